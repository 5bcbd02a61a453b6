"""Policies (layer 3): a transformers model as the trainer sees it.

Import `CausalPolicy` from policy.py; `build/built_model.py` makes it. The other files load checkpoints, run the forward
pass, add LoRA and list the weights as engines serve them.
"""
