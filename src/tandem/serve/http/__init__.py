"""What every service shares: access, refusals, bounds on requests, OpenAPI, start and stop.

Import `create_app` from service.py and `Server` from run.py.
"""
