"""What runs inside vLLM's processes and their Python environment (layer 4): torch and the standard library alone.

vLLM imports extension.py into each worker and scheduler.py into its scheduler. worker.py receives and loads versions,
served_memory.py maps and overwrites the weights, lora_slots.py holds adapters, token_recorder.py the sampled tokens.
"""
