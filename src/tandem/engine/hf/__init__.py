"""The embedded engine: continuous batching on a transformers module in this process.

Import `EmbeddedEngine` from engine.py; the other files are its parts.
"""
