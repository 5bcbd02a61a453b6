"""HTTP clients of engines: pooled connections, server-sent events, a deadline on silence.

The other engine folders import it; it imports none of them.
"""
