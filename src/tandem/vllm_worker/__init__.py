"""What runs in an engine's own process, its Python environment included: torch and the standard library alone."""
