"""Optimizers and schedules (layer 3): one file each, applied by optimizer.py. `build/optimizers.py` picks one."""
