"""Learning while serving (layer 6): the two processes of an online server, its jobs, versions, gates and replay.

The server process runs orchestrator.py; the trainer process runs trainer_worker.py; messages.py is between them. Only
`serve/`, `build/` and `recipes/` import from here.
"""
