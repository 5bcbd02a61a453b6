"""Build the objects that a spec asks for. Only this package names concrete classes (the composition root)."""
