"""shared: single copy. The trainer's parameters are views of the engine's memory."""
