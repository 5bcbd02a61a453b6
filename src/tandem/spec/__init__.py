"""The settings of a run, written in TOML: frozen, checked pydantic models. This package never imports torch."""
