"""Where command lines run (layer 3): each provider drives an engine that others maintain, in a file of its own.

A provider declares its settings, which are a table of the file of targets, and implements `tandem.protocols.Provider`.
Only `build/targets.py` names the classes.
"""
