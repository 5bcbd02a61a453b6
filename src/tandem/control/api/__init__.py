"""The HTTP API of the control plane, on the server that all Tandem services share.

service.py: who may call what, and the service as a whole. run_routes.py: runs. agent_routes.py: attempts.
org_routes.py: orgs, projects and keys. secret_routes.py: secrets. Bodies and answers are in `tandem.shapes`.
"""
