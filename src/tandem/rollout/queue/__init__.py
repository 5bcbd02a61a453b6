"""The durable rollout queue: leases of groups from many environments to one trainer, each trained on once."""
