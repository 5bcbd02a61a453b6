"""Environments: tasks, and how one is played and scored."""
