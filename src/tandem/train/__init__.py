"""From groups to versions (layer 4): packs a batch, takes an optimizer step, watches memory and learning.

Import `PolicyTrainer` from trainer.py and `make_batch` from batch_packing.py; `build/training.py` makes them.
"""
