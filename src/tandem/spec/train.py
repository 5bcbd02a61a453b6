"""`[train]` and `[warmup]`: the stages that take optimizer steps."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec
from tandem.spec.data import DataSpec, Demonstrations
from tandem.spec.optim import AdamWSpec, ConstantSchedule, LinearSchedule, OptimizerSpec, ScheduleSpec


class Stage(Spec):
    """What all stages have."""

    steps: int = Field(ge=1)
    """Optimizer steps of this stage."""
    lr: float = Field(gt=0, lt=1)
    """Peak learning rate."""
    schedule: ScheduleSpec = ConstantSchedule()
    """How the learning rate moves over the stage."""
    optimizer: OptimizerSpec = AdamWSpec()
    """Which optimizer, with its settings."""
    clip_norm: float = Field(default=1.0, gt=0)
    """The gradient's global norm is cut to this."""
    lora_plus: float = Field(default=1.0, ge=1)
    """LoRA+: the learning rate of the B matrices is so many times that of the A matrices."""
    gradient_release: bool = False
    """Each gradient moves its weights as soon as backward has made it: gradients never exist together. One micro-batch
    a step; the clip goes by the norm of earlier steps; and a step that turns out bad has moved some weights already."""
    max_idle_steps: int = Field(default=100, ge=1)
    """So many steps in a row that move no weight end the run: no credit, no gradient, or updates rounded away. Before
    anything was learned a fifth of them does (at least 20, if it is as many)."""
    micro_tokens: int = Field(default=16384, ge=16)
    """Most tokens in one forward and backward; a step's samples are packed into as many micro-batches as that takes."""


class SftStage(Stage):
    """Supervised steps on recorded conversations."""

    batch_size: int = Field(default=32, ge=1)
    """Conversations per optimizer step."""


class WarmupStage(SftStage):
    """`[warmup]`: supervised steps before RL, in the same run and counted in the same version."""

    data: DataSpec = Demonstrations()
    """What to imitate."""
    schedule: ScheduleSpec = LinearSchedule()
    """How the learning rate moves over the stage."""


class RlStage(Stage):
    """`[train]` of an RL spec."""

    groups_per_step: int = Field(ge=1)
    """Tasks per optimizer step."""
    group_size: int = Field(ge=2)
    """Samples of each task, compared with each other."""
    max_lag: int = Field(default=0, ge=0, le=64)
    """No token trained on is older than this many versions; 0 is on-policy."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens in one assistant turn."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Of the rollouts; the trainer's logprobs use the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of the rollouts; the trainer's logprobs are of the same nucleus. 1 keeps every token, and is faster."""
    thinking_length_penalty: float = Field(default=0.0, ge=0)
    """Taken off a reward, times the share of max_tokens that went into thinking. Evaluations take nothing off."""
    replace_equal_groups: int = Field(default=0, ge=0)
    """Groups whose siblings all scored alike are dropped and others played instead (dynamic sampling), at most so many
    in a row; beyond that, and with 0 always, they count and move nothing."""
    max_dropped: int = Field(default=256, ge=1)
    """So many groups in a row that failed or were replaced end the run."""
    group_timeout_s: float = Field(default=600.0, gt=0)
    """The longest that the trainer waits for its next groups."""
    max_logprob_gap: float = Field(default=0.05, gt=0)
    """Largest mean difference between engine and trainer about tokens of the current version; more ends the run."""
