"""Environments (layer 3): tasks, and how one is played and scored.

load.py finds one by its name or path and protocol_check.py checks it. `builtin/` and `adapters/` hold them, one file
each. forkserver.py and worker.py run the user's environment in processes that `rollout/workers/` starts.
"""
