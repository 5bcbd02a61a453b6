"""Engines (layer 3), one folder each. They sample tokens and hold one version of the weights.

pool.py combines several engines, restartable.py wraps one that can be restarted, null.py is for stages that sample
nothing. Callers use the protocol `Engine`; only `build/` imports a concrete engine.
"""
