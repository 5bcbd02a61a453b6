"""HTTP towards engines: pooled connections, server-sent events, a deadline on silence."""
