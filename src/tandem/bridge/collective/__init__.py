"""Bridges over a process group: `broadcast` of all weights and `adapter_broadcast` of an adapter."""
