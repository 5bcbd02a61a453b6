"""Optimizers and schedules (layer 3): one file each, over the base in optimizer.py. `build/training.py` picks one."""
