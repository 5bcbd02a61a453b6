"""`[eval]`: how a run is judged."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class EvalSpec(Spec):
    """Held-out tasks, played greedily before and after, compared pair by pair."""

    tasks: int = Field(default=256, ge=2)
    """How many held-out tasks; fewer if the environment has fewer."""
    every: int = Field(default=0, ge=0)
    """Also after every so many RL steps; 0: only before and after."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in one assistant turn; 0 takes train.max_tokens."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Of the paired bootstrap interval behind the verdict."""


class LossEvalSpec(Spec):
    """Held-out loss of a run on recorded data, before and after."""

    examples: int = Field(default=256, ge=2)
    """Held-out conversations, or pairs of answers; fewer if there are fewer."""
    every: int = Field(default=0, ge=0)
    """Also after every so many steps; 0: only before and after."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Of the paired bootstrap interval behind the verdict."""
