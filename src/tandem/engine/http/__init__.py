"""HTTP towards engines: pooled connections, server-sent events, a deadline on silence.

The other engine folders import it; it knows none of them.
"""
