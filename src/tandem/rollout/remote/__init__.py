"""Clients of a rollout service: the trainer's store (trainer_store.py) and an environment's (environment_store.py)."""
