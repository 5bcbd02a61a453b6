"""The gateway's sessions: agents' conversations as token trees, with rewards, kept on disk."""
