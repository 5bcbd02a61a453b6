"""`optimizer` and `schedule` of a training stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class AdamWSpec(Spec):
    """AdamW with decoupled weight decay (torch's)."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, never to norms and biases."""


OptimizerSpec = AdamWSpec
"""A union with one member; the next optimizer makes it a discriminated one."""


class ConstantSchedule(Spec):
    """The same learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate rises linearly over the first so many steps."""


class LinearSchedule(ConstantSchedule):
    """Falls in a straight line."""

    kind: Literal["linear"] = "linear"  # pyright: ignore[reportIncompatibleVariableOverride]
    final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of `lr`."""


class CosineSchedule(LinearSchedule):
    """Falls along half a cosine."""

    kind: Literal["cosine"] = "cosine"  # pyright: ignore[reportIncompatibleVariableOverride]


ScheduleSpec = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="kind")]
