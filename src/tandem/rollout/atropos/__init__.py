"""The Atropos protocol over the rollout queue: its calls, its group format, its version lookup."""
