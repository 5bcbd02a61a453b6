"""An engine as an HTTP service: its routes, and who may change its weights."""
