"""What all bridges share: deadlines, the manifest with the base of the engine's ends, and packing."""
