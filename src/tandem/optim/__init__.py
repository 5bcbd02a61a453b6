"""Optimizers and schedules: one file each."""
