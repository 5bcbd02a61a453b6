"""`[algorithm]` and `[train]` of a preference run: DPO on pairs of answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec
from tandem.spec.train import SftStage


class DpoSpec(Spec):
    """Direct preference optimisation: raise the chosen answer's probability over the rejected one's, relative to the
    initial weights."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference. A larger beta counts a pair as learned sooner and moves the model less."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Conservative DPO: assumed share of pairs with swapped labels; it bounds the margin. 0: none."""
    length_normalised: bool = False
    """Use the mean over an answer's tokens instead of the sum, so that length has no effect. Needs a `beta` of 2 to 10.
    """
    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen answers' own loss per token, which keeps them likely; 0: only the difference counts."""


class PreferenceStage(SftStage):
    """Optimizer steps on pairs of answers."""

    batch_size: int = Field(default=32, ge=1)
    """Pairs per optimizer step."""
