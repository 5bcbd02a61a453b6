"""`[engine]`: who samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class HfEngineSpec(Spec):
    """The embedded engine: in this process, on the trainer's own module."""

    kind: Literal["hf"] = "hf"
    max_running: int = Field(default=256, ge=1, le=4096)
    """Most sequences decoded together."""
    max_context: int = Field(default=0, ge=0)
    """Longest prompt plus completion; 0 takes what the model was made for."""
    kv_gib: float = Field(default=4.0, gt=0)
    """Memory for keys and values; requests that do not fit yet wait."""
    deadline_s: float = Field(default=60.0, gt=0)
    """An engine that makes no token for anybody for so long is silent, and ends the run."""
    replicas: int = Field(default=1, ge=1, le=8)
    """Several engines behind one pool. They share the module: for rehearsing a set-up, not for speed."""


EngineSpec = HfEngineSpec
"""A union with one member; the next engine makes it a discriminated one."""
