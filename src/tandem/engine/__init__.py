"""Engines (layer 3): a folder each. They sample tokens and hold one version of the weights.

pool.py makes several engines one, restartable.py one that can be started again, null.py is for stages that sample
nothing. Callers know the protocol `Engine`; only `build/` imports a concrete engine.
"""
