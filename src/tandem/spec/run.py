"""A whole run: `recipe = "rl"`, `"sft"` or `"preference"` at the top of the file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.spec.algorithm import AlgorithmSpec, DrGrpoSpec
from tandem.spec.base import Spec
from tandem.spec.data import RecordedData
from tandem.spec.engine import EngineSpec, HfEngineSpec
from tandem.spec.environment import EnvironmentSpec
from tandem.spec.evaluation import EvalSpec, LossEvalSpec
from tandem.spec.model import ModelSpec
from tandem.spec.precision import Float32Precision, PrecisionSpec
from tandem.spec.preference import DpoSpec, PreferenceStage
from tandem.spec.sync import SyncSpec
from tandem.spec.train import RlStage, SftStage, WarmupStage


class _Run(Spec):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The run directory is runs/<name>-<time>."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of everything: weights made from scratch, data order, tasks, sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    deterministic: bool = True
    """The same spec and seed give the same bytes; what that costs is in docs/concepts.md."""
    strict: bool = False
    """An optimisation that was asked for and cannot be had ends the run, instead of being reported."""
    model: ModelSpec
    """Which weights, and how many of them are trained."""
    precision: PrecisionSpec = Float32Precision()
    """How many bits the weights have, and where the rest of each is kept."""


class RlSpec(_Run):
    """Reinforcement learning on an environment, with an optional supervised stage before it."""

    recipe: Literal["rl"] = "rl"
    environment: EnvironmentSpec
    """Where tasks and rewards come from."""
    warmup: WarmupStage | None = None
    """Supervised steps before RL. Left out: RL begins with the weights as they are."""
    train: RlStage
    """The RL steps."""
    algorithm: AlgorithmSpec = DrGrpoSpec()
    """How rewards become a gradient."""
    engine: EngineSpec = HfEngineSpec()
    """Who samples."""
    sync: SyncSpec = SyncSpec()
    """How a version reaches the engine."""
    eval: EvalSpec = EvalSpec()
    """How the run is judged."""

    @model_validator(mode="after")
    def _fits_together(self) -> RlSpec:
        if self.sync.every > self.train.max_lag + 1:
            raise ValueError(
                f"sync.every = {self.sync.every}: groups would wait longer than train.max_lag = {self.train.max_lag} "
                f"allows; set sync.every <= {self.train.max_lag + 1}, or train.max_lag >= {self.sync.every - 1}"
            )
        if self.sync.every > 1:
            raise ValueError(
                f"sync.every = {self.sync.every}: bridge = 'inproc' has one copy of the weights, so every step "
                "reaches the engine at once; leave sync.every out"
            )
        if self.train.thinking_length_penalty and not self.model.thinking:
            raise ValueError(
                f"train.thinking_length_penalty = {self.train.thinking_length_penalty:g}: model.thinking is false, so "
                "there is no thinking to make shorter; set model.thinking = true, or leave the penalty out"
            )
        for name, stage in (("train", self.train), ("warmup", self.warmup)):
            if stage is not None and stage.schedule.warmup_steps >= stage.steps:
                raise ValueError(_warmup_too_long(name, stage.schedule.warmup_steps, stage.steps))
        return self


class SftSpec(_Run):
    """Supervised training on recorded conversations."""

    recipe: Literal["sft"] = "sft"
    data: RecordedData
    """The conversations to imitate."""
    train: SftStage
    """The supervised steps."""
    eval: LossEvalSpec = LossEvalSpec()
    """How the run is judged."""

    @model_validator(mode="after")
    def _fits_together(self) -> SftSpec:
        if self.train.schedule.warmup_steps >= self.train.steps:
            raise ValueError(_warmup_too_long("train", self.train.schedule.warmup_steps, self.train.steps))
        return self


class PreferenceSpec(_Run):
    """Training on pairs of recorded answers, one of them better."""

    recipe: Literal["preference"] = "preference"
    data: RecordedData
    """Rows with `prompt`, `chosen` and `rejected`."""
    train: PreferenceStage
    """The steps."""
    algorithm: DpoSpec = DpoSpec()
    """How a pair becomes a gradient."""
    eval: LossEvalSpec = LossEvalSpec()
    """How the run is judged."""

    @model_validator(mode="after")
    def _fits_together(self) -> PreferenceSpec:
        if self.train.schedule.warmup_steps >= self.train.steps:
            raise ValueError(_warmup_too_long("train", self.train.schedule.warmup_steps, self.train.steps))
        return self


def _warmup_too_long(stage: str, warmup_steps: int, steps: int) -> str:
    return (
        f"{stage}.schedule.warmup_steps = {warmup_steps}: the stage has {steps} steps in all; "
        f"set it below {steps}, or raise {stage}.steps"
    )


RunSpec = Annotated[RlSpec | SftSpec | PreferenceSpec, Field(discriminator="recipe")]
