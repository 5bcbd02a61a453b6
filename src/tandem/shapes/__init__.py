"""What travels between a user, the control plane and an agent (layer 2): pydantic models, no I/O.

agent.py: between the control plane and the agent of one attempt. runs.py: between a user and the control plane.
"""
