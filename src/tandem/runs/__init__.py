"""Runs (layer 6): a spec, a directory, a status. Checkpoints, leases, resuming, supervision, failures, uploads.

It imports no torch, so that `tandem watch`, `plan` and `doctor` start fast.
"""
