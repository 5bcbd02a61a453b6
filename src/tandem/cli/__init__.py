"""The command line (layer 10): one file per group of commands, each a thin layer over the Python API.

Nothing imports it but `tandem.__main__` and the installed script. It imports no torch at module level.
"""
