"""Algorithms: one file each, three functions each."""
