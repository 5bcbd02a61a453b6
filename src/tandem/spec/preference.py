"""`[algorithm]` and `[train]` of a preference run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec
from tandem.spec.train import SftStage


class DpoSpec(Spec):
    """Direct preference optimisation: the chosen answer gains on the rejected one, against the weights that training
    began with."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    """How dear it is to leave the reference: the larger, the sooner a pair counts as learned, and the less it moves."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Conservative DPO: the share of pairs that are taken to be labelled the wrong way round; it bounds the margin."""
    length_normalised: bool = False
    """An answer's gain is the mean over its tokens, not the sum: length earns nothing. Wants a `beta` of 2 to 10."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen answers' own loss a token, which keeps them likely; 0 looks at the difference alone."""


class PreferenceStage(SftStage):
    """Steps on pairs of answers."""

    batch_size: int = Field(default=32, ge=1)
    """Pairs per optimizer step."""
