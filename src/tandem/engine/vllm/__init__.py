"""vLLM as an engine: its process, weight updates, sampled tokens, tested versions."""
