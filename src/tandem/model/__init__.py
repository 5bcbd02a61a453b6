"""Policies: the model as the trainer sees it."""
