"""The settings of a run (layer 1), written in TOML: frozen, checked pydantic models, one file per table.

Import `load_spec` from load.py. bridges.py says what each bridge needs. Never torch.
"""
