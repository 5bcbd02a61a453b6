"""Train on groups (layer 4): pack a batch, take an optimizer step, account for memory, check that weights change.

Import `PolicyTrainer` from trainer.py and `make_batch` from batch_packing.py; `build/training.py` makes them.
"""
