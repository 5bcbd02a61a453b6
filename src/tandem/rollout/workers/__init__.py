"""Environments in worker processes: the pool that plays episodes and the client of its fork server."""
