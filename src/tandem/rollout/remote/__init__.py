"""Clients of a rollout service: the store of a trainer and the store of an environment."""
