"""restart: a whole checkpoint, and the engine's process starts again from it."""
