"""Environments: tasks, and how one is played and scored. One file each; `load.py` finds them by name."""
