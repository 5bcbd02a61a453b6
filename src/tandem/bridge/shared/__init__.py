"""The bridge `shared`: one copy of the weights. The trainer's parameters are views of the engine's memory.

Import `SharedBridge` (build) and `SharedEnd` (weight_sources); memory.py is for CPUs, cuda_ipc.py for GPUs.
"""
