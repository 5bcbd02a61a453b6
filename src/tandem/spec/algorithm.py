"""`[algorithm]`: how rewards become a gradient."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class _PolicyGradient(Spec):
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose ratio fell below 1 - clip_low gets no further push down."""
    clip_high: float = Field(default=0.28, gt=0)
    """A token whose ratio rose above 1 + clip_high gets no further push up."""
    ratio_cap: float = Field(default=2.0, ge=1)
    """Token-level truncated importance sampling: the weight of a token never exceeds this."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term that holds the policy near where RL began; 0 leaves the reference out of memory."""


class DrGrpoSpec(_PolicyGradient):
    """Reward minus the group's mean, every token counted alike: no bias by length or by spread."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class GrpoSpec(_PolicyGradient):
    """The first GRPO: divided by the group's spread, averaged within each sequence."""

    kind: Literal["grpo"] = "grpo"
    spread_floor: float = Field(default=1e-4, gt=0)
    """Added to the spread before dividing."""


class RlooSpec(_PolicyGradient):
    """Reward minus the mean of the other siblings."""

    kind: Literal["rloo"] = "rloo"


AlgorithmSpec = Annotated[DrGrpoSpec | GrpoSpec | RlooSpec, Field(discriminator="kind")]
