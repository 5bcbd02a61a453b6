"""`[algorithm]` and `[train]` of a preference run: DPO, ORPO, a reward model or a loss of
your own on pairs of answers, KTO on answers with a label."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from tandem.spec.base import Spec
from tandem.spec.own import OwnAlgorithmSpec, as_own
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


class OrpoSpec(Spec):
    """Odds ratio preference optimisation: imitate the chosen answer, and raise its odds over the rejected one's. It
    keeps no reference model, so it can take the place of supervised training."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio, beside the chosen answer's loss per token."""


class KtoSpec(Spec):
    """Kahneman-Tversky optimisation: answers with a label, good or bad, without a second answer to compare with. Each
    is raised or lowered relative to the initial weights."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference. A larger beta counts an answer as learned sooner and moves the model less.
    """
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the loss of good answers; raise it if they are few, so that weight times count is about equal."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the loss of bad answers."""


class RewardModelSpec(Spec):
    """A reward model: the model gets a head with one output, and learns to give the better answer the higher score
    (Bradley-Terry). Its export is transformers' AutoModelForSequenceClassification."""

    kind: Literal["reward_model"] = "reward_model"
    centre_coef: float = Field(default=0.01, ge=0)
    """Weight of the square of a pair's scores together, which keeps scores around 0; 0: only differences count."""


def _dpo_if_left_out(raw: Any) -> Any:
    raw = as_own(raw)
    if not isinstance(raw, dict):
        return raw
    table = cast("dict[str, Any]", raw)
    return table if "kind" in table else {"kind": "dpo", **table}


PreferenceAlgorithm = Annotated[
    Annotated[DpoSpec | OrpoSpec | KtoSpec | RewardModelSpec | OwnAlgorithmSpec, Field(discriminator="kind")],
    BeforeValidator(_dpo_if_left_out),
]


class PreferenceStage(SftStage):
    """Optimizer steps on pairs of answers, or on answers with a label."""

    batch_size: int = Field(default=32, ge=1)
    """Pairs per optimizer step; with `kto`, answers. KTO estimates a KL over them, so give it 8 or more."""
