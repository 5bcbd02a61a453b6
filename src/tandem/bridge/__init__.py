"""Weight modes: a folder each, both ends side by side."""
