"""The durable rollout queue: leases of groups from many environments to one trainer, each trained on once.

Import `RolloutQueue` from queue.py; it is composed of registration, environment_calls and trainer_calls over core.py.
"""
