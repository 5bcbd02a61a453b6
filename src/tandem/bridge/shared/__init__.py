"""The bridge `shared`: one copy of the weights. The trainer's parameters are views of the engine's memory."""
