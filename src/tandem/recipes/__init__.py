"""The composition root: what is built from a spec, and the recipes."""
