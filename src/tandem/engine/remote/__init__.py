"""Any OpenAI-compatible server with token ids as an engine."""
