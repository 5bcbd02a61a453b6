"""Other people's environments, each behind one file; what a file needs is an extra of the package of the same name."""
