"""An engine in another process of Tandem: the client engine, its connection and its child process."""
