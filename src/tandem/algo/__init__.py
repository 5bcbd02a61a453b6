"""Algorithms (layer 3): one file each, with three functions: keep, credit, loss.

`build/training.py` picks one by the spec. Shared arithmetic is in policy_gradient.py, importance_ratio.py and
advantages.py. Imports protocols and types; no model, no engine.
"""
