"""`[train]` and `[warmup]`: the stages that take optimizer steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec
from tandem.spec.data import DataSpec, Demonstrations
from tandem.spec.optim import AdamWSpec, ConstantSchedule, LinearSchedule, OptimizerSpec, ScheduleSpec


class Stage(Spec):
    """Fields of every training stage."""

    steps: int = Field(ge=1)
    """Optimizer steps of this stage."""
    lr: float = Field(gt=0, lt=1)
    """Peak learning rate."""
    schedule: ScheduleSpec = ConstantSchedule()
    """Learning rate over the steps of the stage."""
    optimizer: OptimizerSpec = AdamWSpec()
    """The optimizer with its settings."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; a larger gradient is scaled down."""
    lora_plus: float = Field(default=1.0, ge=1)
    """LoRA+: learning rate of the B matrices, as a multiple of that of the A matrices; 1: the same."""
    gradient_release: bool = False
    """true: apply each gradient as soon as the backward pass has computed it, so that they are never in memory
    together. A step then has one micro-batch, clipping uses the norm of earlier steps, and a failed step has already
    changed some weights."""
    max_idle_steps: int = Field(default=100, ge=1)
    """The run ends after this many steps in a row that changed no weight: no advantage, no gradient, or updates rounded
    away. Before the first change, a fifth of this is enough (but at least 20, or this number if it is smaller)."""
    micro_tokens: int = Field(default=16384, ge=16)
    """Most tokens in one forward and backward pass; a step's samples are packed into as many micro-batches as needed.
    """


class SftStage(Stage):
    """Supervised steps on recorded conversations."""

    batch_size: int = Field(default=32, ge=1)
    """Conversations per optimizer step."""


class WarmupStage(SftStage):
    """`[warmup]`: supervised steps before RL, in the same run and counted in the same version."""

    data: DataSpec = Demonstrations()
    """The conversations to train on."""
    schedule: ScheduleSpec = LinearSchedule()
    """Learning rate over the steps of the stage."""


class RlStage(Stage):
    """`[train]` of an RL spec."""

    groups_per_step: int = Field(ge=1)
    """Tasks per optimizer step."""
    group_size: int = Field(ge=2)
    """Samples per task; their rewards are compared with each other."""
    max_lag: int = Field(default=0, ge=0, le=64)
    """Most versions that a trained token may be old; 0: on-policy."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens in one assistant turn."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature of rollouts; the trainer's logprobs use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of rollouts; the trainer's logprobs use it too. 1 keeps every token and is faster."""
    thinking_length_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from a reward, times the share of max_tokens spent on thinking. Evaluations subtract nothing."""
    replace_equal_groups: int = Field(default=0, ge=0)
    """Most groups in a row to drop and replace because all their rewards are equal (dynamic sampling). Further ones are
    trained on and change nothing. 0: replace none."""
    max_dropped: int = Field(default=256, ge=1)
    """The run ends after this many groups in a row that failed or were replaced."""
    group_timeout_s: float = Field(default=600.0, gt=0)
    """Most seconds that the trainer waits for its next groups."""
    max_logprob_gap: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Largest mean logprob difference, in nats, between engine and trainer on tokens of the current version; the run
    ends if it is larger. auto: three times the gap of the run's first batch, at least 0.005 in float32 and 0.05 in 16
    bits, where the first batch may have 0.02 and 0.12; in 16 bits more for models of over 24 layers. Older tokens may
    differ by what the policy moved since then, too: at most twice what the updates between moved, as measured, and at
    most 0.2 to 1 nats a version."""
