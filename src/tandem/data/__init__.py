"""Recorded conversations for supervised training."""
