"""The embedded engine: continuous batching on a transformers module in this process."""
