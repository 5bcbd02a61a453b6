"""Environments in worker processes: the pool that plays episodes (pool.py) and the client of its fork server.

The code inside those processes is env/forkserver.py and env/worker.py.
"""
