"""Adapters for environments of other libraries, one file each; each library is an extra of the package."""
