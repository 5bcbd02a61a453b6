"""An engine in another process of Tandem, seen from the trainer's process.

engine.py is the Engine, connection.py its HTTP calls, child_process.py the process that this one starts and ends,
read_only_client.py a client that only samples. The other process runs `serve/engine/`.
"""
