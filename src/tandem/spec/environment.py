"""`[environment]`: where tasks and rewards come from."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tandem.spec.base import Spec


class EnvironmentSpec(Spec):
    """An environment by name, with the parameters of its own class."""

    name: str = Field(min_length=1)
    """arithmetic, sort or guess; or your own: package.module:Class, or a file path (path/to/env.py:Class)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's class as keyword arguments; an unknown one is refused."""
    episode_timeout_s: float = Field(default=60.0, gt=0)
    """An episode that takes longer costs its group; its waits for the engine are not counted."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """The run ends when more than this share of the last 100 groups failed."""
