"""adapter_broadcast: LoRA tensors in one flat transfer, no disk."""
