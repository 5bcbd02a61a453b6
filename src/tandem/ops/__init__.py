"""Tensor helpers that models and engines share."""
