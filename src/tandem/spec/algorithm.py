"""`[algorithm]`: how RL turns rewards into a gradient."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tandem.spec.base import LocalPath, Spec
from tandem.spec.own import OwnAlgorithmSpec, as_own
from tandem.spec.preference import PreferenceAlgorithm

# --- corrections for tokens that an older version sampled


class NoCorrection(Spec):
    """Weight each token by its ratio: its probability now over the probability it was sampled with."""

    kind: Literal["none"] = "none"


class TruncateToken(Spec):
    """Weight each token by its ratio, cut to `ratio_cap`; a token above the cap still has a gradient."""

    kind: Literal["truncate_token"] = "truncate_token"
    ratio_cap: float = Field(default=2.0, ge=1)
    """Largest ratio."""


class TruncateSequence(TruncateToken):
    """Weight each token by its sequence's ratio (the product over its tokens), cut to `ratio_cap`."""

    kind: Literal["truncate_sequence"] = "truncate_sequence"  # pyright: ignore[reportIncompatibleVariableOverride]


class MaskToken(TruncateToken):
    """Weight each token by its ratio; drop tokens below `ratio_floor` or above `ratio_cap`."""

    kind: Literal["mask_token"] = "mask_token"  # pyright: ignore[reportIncompatibleVariableOverride]
    ratio_floor: float = Field(default=0.5, gt=0, lt=1)
    """Smallest ratio."""


class MaskSequence(MaskToken):
    """Weight each token by its sequence's ratio; drop sequences below `ratio_floor` or above `ratio_cap`."""

    kind: Literal["mask_sequence"] = "mask_sequence"  # pyright: ignore[reportIncompatibleVariableOverride]


Correction = Annotated[
    TruncateToken | TruncateSequence | MaskToken | MaskSequence | NoCorrection, Field(discriminator="kind")
]

# --- fields that several algorithms share


class RewardSpec(Spec):
    """Fields of every algorithm that learns from rewards."""

    advantage_clip: float = Field(default=0.0, ge=0)
    """Largest absolute advantage; larger ones are cut to this. 0: no limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term that holds the policy near the weights that RL began with; 0: no KL term, and no reference
    model in memory."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term: k1 and k2 give the gradient of KL(policy, reference), k3 that of KL(reference,
    policy)."""

    @model_validator(mode="after")
    def _estimates_something(self) -> RewardSpec:
        if self.kl_estimator != "k3" and self.kl_coef == 0:
            raise ValueError(
                f"kl_estimator = '{self.kl_estimator}': has no effect while kl_coef = 0; set kl_coef, or leave "
                "kl_estimator out"
            )
        return self


class ClippedSpec(RewardSpec):
    """Fields of algorithms that clip and correct each token by itself."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose ratio is below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=0.28, gt=0)
    """A token whose ratio is above 1 + clip_high is not pushed further up."""
    correction: Correction = TruncateToken()
    """How tokens that an older version sampled are weighted."""


class SpreadSpec(Spec):
    """Fields of algorithms that divide by the standard deviation of rewards."""

    spread_floor: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation before dividing by it."""


# --- the algorithms


class DrGrpoSpec(ClippedSpec):
    """Advantage: reward minus the group's mean. Every token has the same weight, so length and spread add no bias."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class GrpoSpec(ClippedSpec, SpreadSpec):
    """The original GRPO: advantages are divided by the group's standard deviation, losses averaged per sequence."""

    kind: Literal["grpo"] = "grpo"


class RlooSpec(ClippedSpec):
    """Advantage: reward minus the mean reward of the group's other samples."""

    kind: Literal["rloo"] = "rloo"


class DapoSpec(ClippedSpec, SpreadSpec):
    """GRPO with one weight for every token and a penalty for long answers; see also `train.replace_equal_groups`."""

    kind: Literal["dapo"] = "dapo"
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward of a truncated answer; 0: no penalty for length."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before `train.max_tokens` over which the penalty grows linearly; 0: truncated answers only."""


class GspoSpec(RewardSpec, SpreadSpec):
    """One ratio and clip per sequence: the geometric mean of the sequence's token ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """A sequence whose ratio is below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=4e-4, gt=0)
    """A sequence whose ratio is above 1 + clip_high is not pushed further up."""


class CispoSpec(RewardSpec, SpreadSpec):
    """The clipped ratio is a constant weight, so every token keeps a gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Smallest weight of a token is 1 - clip_low."""
    clip_high: float = Field(default=4.0, gt=0)
    """Largest weight of a token is 1 + clip_high."""


class ReinforcePpSpec(ClippedSpec, SpreadSpec):
    """REINFORCE++: normalises rewards over all groups of the step."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """group: subtract the group's mean reward first. none: subtract only the step's mean, so that groups with equal
    rewards also have a gradient."""


class PpoSpec(RewardSpec):
    """PPO without a critic, with a second clip for tokens with a negative advantage that became much likelier."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose ratio is below 1 - clip_low is not pushed further down."""
    clip_high: float = Field(default=0.2, gt=0)
    """A token whose ratio is above 1 + clip_high is not pushed further up."""
    dual_clip: float = Field(default=3.0, gt=1)
    """A token with a negative advantage whose ratio is above this has no gradient."""


class RejectionSamplingSpec(Spec):
    """Rejection sampling (best of n, RAFT): the best answers of each group are imitated, the others are left out."""

    kind: Literal["rejection_sampling"] = "rejection_sampling"
    best: int = Field(default=1, ge=1)
    """Answers of a group that are trained on, those with the highest rewards; never one with its lowest reward.
    `train.group_size`: all that are better than the worst."""
    correction: Correction = TruncateToken()
    """How tokens that an older version sampled are weighted."""


class DistillSpec(Spec):
    """On-policy distillation: a teacher scores each token that the policy samples (reverse KL)."""

    kind: Literal["distill"] = "distill"
    teacher: Annotated[str, LocalPath()] = Field(min_length=1)
    """Directory or hub id of the teacher, which is then loaded beside the policy; or, as http://host:8000/v1, a server
    that has it and gives logprobs of given tokens (`tandem serve`, vLLM). It must have the policy's tokenizer."""
    teacher_revision: str = "main"
    """Branch, tag or commit of a hub id."""
    teacher_model: str = ""
    """The teacher's name on its server; empty: the server has one model."""
    teacher_key_env: str = ""
    """Environment variable with the server's API key; empty: none."""
    teacher_key_file: Annotated[str, LocalPath("always")] = ""
    """File with the server's API key, such as the token file that `tandem serve` prints; empty: none."""
    teacher_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for the server's logprobs of one answer, retries included; a slower server ends the run."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the reward minus the group's mean, added to the teacher's signal; 0: ignore rewards."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """Largest absolute advantage of a token; larger ones are cut to this. 0: no limit."""
    correction: Correction = TruncateToken()
    """How tokens that an older version sampled are weighted."""

    @property
    def is_served(self) -> bool:
        """Whether another process has the teacher."""
        return "://" in self.teacher

    @model_validator(mode="after")
    def _of_one_kind(self) -> DistillSpec:
        odd = ("teacher_revision",) if self.is_served else ("teacher_model", "teacher_key_env", "teacher_key_file")
        for name in odd:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                kind = "the URL of a server" if self.is_served else "loaded by this run"
                raise ValueError(f"{name} = '{value}': has no effect, because the teacher is {kind}; leave it out")
        if self.is_served and not self.teacher.startswith(("http://", "https://")):
            raise ValueError(f"teacher = '{self.teacher}': is no directory, no hub id, and no http(s) URL; correct it")
        if self.teacher_key_env and self.teacher_key_file:
            raise ValueError("teacher_key_env and teacher_key_file: both name the server's key; leave one of them out")
        return self


AlgorithmSpec = Annotated[
    Annotated[
        DrGrpoSpec | GrpoSpec | RlooSpec | DapoSpec | GspoSpec | CispoSpec | ReinforcePpSpec | PpoSpec
        | RejectionSamplingSpec | DistillSpec | OwnAlgorithmSpec,
        Field(discriminator="kind"),
    ],
    BeforeValidator(as_own),
]  # fmt: skip


def uses_reference(algorithm: AlgorithmSpec | PreferenceAlgorithm) -> bool:
    """Return whether its loss compares the policy with the weights that training began with."""
    if isinstance(algorithm, OwnAlgorithmSpec):
        return algorithm.reference
    if isinstance(algorithm, RewardSpec):
        return algorithm.kl_coef > 0
    return algorithm.kind in ("dpo", "kto")
