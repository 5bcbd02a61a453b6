"""The base classes of what travels over HTTP."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Asked(BaseModel):
    """A request's body. Unknown fields are refused: a field that a server does not know must not be lost silently."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        hide_input_in_errors=True,  # it may be a secret
    )


class Answer(BaseModel):
    """A response's body. Unknown fields are ignored: a newer server may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, hide_input_in_errors=True)
