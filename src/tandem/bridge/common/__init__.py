"""What all bridges share: the manifest, deadlines, flat buffers, the base of the engine ends."""
