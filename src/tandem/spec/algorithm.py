"""`[algorithm]`: how rewards become a gradient."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.spec.base import LocalPath, Spec

# --- what to do about tokens that an older version sampled


class NoCorrection(Spec):
    """A token weighs its plain ratio: its probability now over the one it was sampled with."""

    kind: Literal["none"] = "none"


class TruncateToken(Spec):
    """A token weighs its ratio, cut to `ratio_cap`: past it, it still pushes."""

    kind: Literal["truncate_token"] = "truncate_token"
    ratio_cap: float = Field(default=2.0, ge=1)
    """Upper bound of the ratio."""


class TruncateSequence(TruncateToken):
    """A token weighs the ratio of its whole sequence (its tokens' product), cut to `ratio_cap`."""

    kind: Literal["truncate_sequence"] = "truncate_sequence"  # pyright: ignore[reportIncompatibleVariableOverride]


class MaskToken(TruncateToken):
    """A token weighs its ratio; beyond `ratio_floor` or `ratio_cap` it is left out."""

    kind: Literal["mask_token"] = "mask_token"  # pyright: ignore[reportIncompatibleVariableOverride]
    ratio_floor: float = Field(default=0.5, gt=0, lt=1)
    """Lower bound of the ratio."""


class MaskSequence(MaskToken):
    """A token weighs its whole sequence's ratio; beyond `ratio_floor` or `ratio_cap` it is left out."""

    kind: Literal["mask_sequence"] = "mask_sequence"  # pyright: ignore[reportIncompatibleVariableOverride]


Correction = Annotated[
    TruncateToken | TruncateSequence | MaskToken | MaskSequence | NoCorrection, Field(discriminator="kind")
]

# --- what algorithms share


class RewardSpec(Spec):
    """Of every algorithm that learns from rewards."""

    advantage_clip: float = Field(default=0.0, ge=0)
    """The credit that rewards give is cut to within plus and minus this; 0 leaves it as it is."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term that holds the policy near where RL began; 0 leaves the reference out of memory."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL term is estimated: k1 and k2 give the gradient of KL(policy, reference), k3 that of the reverse."""

    @model_validator(mode="after")
    def _estimates_something(self) -> RewardSpec:
        if self.kl_estimator != "k3" and self.kl_coef == 0:
            raise ValueError(
                f"kl_estimator = '{self.kl_estimator}' estimates nothing while kl_coef = 0; set kl_coef, or leave "
                "kl_estimator out"
            )
        return self


class ClippedSpec(RewardSpec):
    """Of those with a clip and a correction, token by token."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose ratio fell below 1 - clip_low gets no further push down."""
    clip_high: float = Field(default=0.28, gt=0)
    """A token whose ratio rose above 1 + clip_high gets no further push up."""
    correction: Correction = TruncateToken()
    """What to do about tokens that an older version sampled."""


class SpreadSpec(Spec):
    """Of those that divide by a spread of rewards."""

    spread_floor: float = Field(default=1e-4, gt=0)
    """Added to the spread before dividing."""


# --- the algorithms


class DrGrpoSpec(ClippedSpec):
    """Reward minus the group's mean, every token counted alike: no bias by length or by spread."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class GrpoSpec(ClippedSpec, SpreadSpec):
    """The first GRPO: divided by the group's spread, averaged within each sequence."""

    kind: Literal["grpo"] = "grpo"


class RlooSpec(ClippedSpec):
    """Reward minus the mean of the other siblings."""

    kind: Literal["rloo"] = "rloo"


class DapoSpec(ClippedSpec, SpreadSpec):
    """GRPO that counts every token alike and punishes long answers; see `train.replace_equal_groups` too."""

    kind: Literal["dapo"] = "dapo"
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward of a truncated answer; 0 punishes no length."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The penalty grows linearly over so many tokens before `train.max_tokens`; 0 punishes truncated answers only."""


class GspoSpec(RewardSpec, SpreadSpec):
    """Ratio and clip of whole sequences: the geometric mean of a sequence's token ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """A sequence whose ratio fell below 1 - clip_low gets no further push down."""
    clip_high: float = Field(default=4e-4, gt=0)
    """A sequence whose ratio rose above 1 + clip_high gets no further push up."""


class CispoSpec(RewardSpec, SpreadSpec):
    """The ratio is a clipped weight and nothing else: every token keeps a gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """No token weighs less than 1 - clip_low."""
    clip_high: float = Field(default=4.0, gt=0)
    """No token weighs more than 1 + clip_high."""


class ReinforcePpSpec(ClippedSpec, SpreadSpec):
    """REINFORCE++: rewards are normalised over all groups of the step."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """group: the group's mean is taken off first. none: the step's mean, so that equal siblings teach too."""


class PpoSpec(RewardSpec):
    """PPO without a critic: a second clip, for tokens with negative credit that grew much likelier."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose ratio fell below 1 - clip_low gets no further push down."""
    clip_high: float = Field(default=0.2, gt=0)
    """A token whose ratio rose above 1 + clip_high gets no further push up."""
    dual_clip: float = Field(default=3.0, gt=1)
    """A token with negative credit whose ratio rose above this gets no further push down."""


class DistillSpec(Spec):
    """On-policy distillation: the policy's own samples, each token judged by a teacher (reverse KL)."""

    kind: Literal["distill"] = "distill"
    teacher: Annotated[str, LocalPath()] = Field(min_length=1)
    """Directory or hub id of the teacher: frozen, with the policy's tokenizer."""
    teacher_revision: str = "main"
    """Branch, tag or commit of a hub id."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the reward minus the group's mean, on top of the teacher; 0 does not look at rewards."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """The credit of a token is cut to within plus and minus this; 0 leaves it as it is."""
    correction: Correction = TruncateToken()
    """What to do about tokens that an older version sampled."""


AlgorithmSpec = Annotated[
    DrGrpoSpec | GrpoSpec | RlooSpec | DapoSpec | GspoSpec | CispoSpec | ReinforcePpSpec | PpoSpec | DistillSpec,
    Field(discriminator="kind"),
]
