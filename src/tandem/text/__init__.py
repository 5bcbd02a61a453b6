"""Chat to token ids, exactly once."""
