"""The Atropos protocol over the rollout queue: its calls, its group format, and which version made a token.

serve/rollouts/atropos_routes.py imports service.py; codec.py turns their groups into ours.
"""
