"""`[eval]`: how a run is evaluated."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class EvalSpec(Spec):
    """Play held-out tasks greedily before and after RL, and compare the results task by task."""

    tasks: int = Field(default=256, ge=2)
    """Number of held-out tasks; fewer if the environment has fewer."""
    every: int = Field(default=0, ge=0)
    """RL steps between two evaluations during the run; 0: only before and after."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in one assistant turn; 0: train.max_tokens."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the paired bootstrap interval that gives the verdict."""


class LossEvalSpec(Spec):
    """Compute the loss on held-out rows before and after training."""

    examples: int = Field(default=256, ge=2)
    """Most held-out conversations, or pairs of answers."""
    every: int = Field(default=0, ge=0)
    """Steps between two evaluations during the run; 0: only before and after."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the paired bootstrap interval that gives the verdict."""
