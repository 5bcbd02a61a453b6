"""Code that runs inside vLLM's processes and their Python environment: it needs torch and the standard library
alone."""
