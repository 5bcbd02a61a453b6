"""adapter: LoRA files in memory-backed storage, under a new name each version."""
