"""Bridges carry a version of the weights from the trainer to engines; both ends of each are side by side."""
