"""Bridges through files: `disk` and `restart` write checkpoints, `adapter` writes LoRA files."""
