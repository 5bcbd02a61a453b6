"""The native wire format of groups: schema.py, validation.py, codec.py. Both ends of the rollout service import it."""
