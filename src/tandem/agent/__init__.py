"""The agent: brings one attempt of a run to its end on the machine where a provider started it (layer 7).

guard.py: starts the agent again if it is killed. attempt.py: claims, watches, tells the end. trainer.py: the trainer's
process, which outlives the agent. shipping.py: what of the run directory is not in the mirror yet. link.py: requests to
the control plane. `tandem.shapes.agent` says what travels.
"""
