"""The engine `remote`: any OpenAI-compatible server that returns token ids. Import `RemoteEngine` from engine.py."""
