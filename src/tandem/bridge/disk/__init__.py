"""disk: a whole checkpoint on a file system that both ends see; the engine reads it in place."""
