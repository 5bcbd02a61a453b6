"""From tasks to groups (layer 4): episodes, recorder, producer, and the store with the staleness bound.

queue/, wire/, atropos/ and remote/ are the rollout service and its clients, sessions/ the gateway's conversations,
workers/ the processes that environments run in. It knows engines and environments by protocol.
"""
