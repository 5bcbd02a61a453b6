"""The gateway's sessions: agents' conversations as token trees, with rewards, kept on disk.

serve/gateway.py imports sessions.py; tree.py is one conversation, store.py its files.
"""
