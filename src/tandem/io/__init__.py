"""Files, processes and messages (layer 2): whole files, sealed directories, JSON with bounds, SQLite, child processes.

Every layer above may import it. It imports errors, types and the spec only, and no torch.
"""
