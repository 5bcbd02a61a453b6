"""Adapters for environments of other libraries, one file each; their requirements are extras of the package."""
