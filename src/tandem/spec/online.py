"""What `tandem online serve` is told: a model that answers, and how it learns meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from tandem.errors import SpecError
from tandem.spec.base import Spec
from tandem.spec.engine import ServerEngineSpec, VllmEngineSpec
from tandem.spec.load import parse_overrides
from tandem.spec.model import ModelSpec, PresetModel
from tandem.spec.online_gates import GateSpec, OrdinarySpec, ReplaySpec, UpdatesSpec, WatchSpec
from tandem.spec.optim import AdamWSpec, OptimizerSpec
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.spec.toml import read_toml


class TeachSpec(Spec):
    """`[train]`: what a job does that does not say otherwise, and what it may not exceed."""

    parts: Literal["auto", "all", "down"] = "auto"
    """Which weights are trained. down: the down projections (`down_proj`) of the middle layers' MLPs: enough for facts,
    and other answers stay. all: every weight. auto: down for a pretrained model that has them, all for one made from
    scratch. Adapters (`model.lora`) are trained whatever this says."""
    lr: float = Field(default=1e-4, gt=0, lt=1)
    """Learning rate of a job that names none. The default is for `parts` = down and for adapters; all weights of a
    pretrained model take a fifth of it, a model made from scratch ten times as much."""
    max_lr: float = Field(default=1e-2, gt=0, lt=1)
    """The most that a job may name."""
    steps: int = Field(default=60, ge=1)
    """Optimizer steps of a job that names none: the most of them, where `known` ends it early."""
    max_steps: int = Field(default=1000, ge=1)
    """The most that a job may name."""
    known: float = Field(default=0.7, ge=0, lt=1)
    """An `sft` job that names no steps ends as soon as the model gives every token that it is taught at least this
    probability; 0: after `steps`."""
    batch_size: int = Field(default=32, ge=1)
    """Samples (or pairs, or groups) of one step; replayed and ordinary ones come on top."""
    max_samples: int = Field(default=4096, ge=1)
    """Of one job."""
    clip_norm: float = Field(default=1.0, gt=0)
    """The gradient's global norm is cut to this."""
    micro_tokens: int = Field(default=8192, ge=16)
    """Most tokens in one forward and backward."""
    context_grad: Literal["full", "none"] = "full"
    """none: what stands before the first trained token is computed without a gradient. Cheaper; the gradient is a
    part of the whole one, and the forward pass is the same."""
    attempts: int = Field(default=3, ge=1, le=10)
    """A job that the trainer died over so many times has failed."""


class OnlineCheckpointSpec(Spec):
    """`[checkpoint]`: every published version is durable; a checkpoint adds the master's bits and the optimizer."""

    every_s: float = Field(default=600.0, gt=0)
    """A checkpoint on a timer, if a version was published since the last one."""
    at_shutdown: bool = True
    """And one when the server is told to end."""


class OnlineSpec(Spec):
    """A server that learns."""

    name: str = Field(default="online", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """What clients call the model."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of weights made from scratch, of data order, of replay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    model: ModelSpec
    """Which weights, and how many of them are trained."""
    precision: PrecisionSpec = Float32Precision()
    """How many bits the weights have, and where the rest of each is kept."""
    optimizer: OptimizerSpec = AdamWSpec()
    """Which optimizer, with its settings; its state lives as long as the server's data."""
    train: TeachSpec = TeachSpec()
    """What a job does that does not say otherwise."""
    gates: GateSpec = GateSpec()
    """What a candidate must pass before it is published."""
    replay: ReplaySpec = ReplaySpec()
    """Earlier samples that are trained again with new ones."""
    ordinary: OrdinarySpec = OrdinarySpec()
    """Prompts outside of every lesson, whose answers are to stay as they are."""
    watch: WatchSpec | None = None
    """A metric whose fall brings the version before back. Left out: none."""
    engine: Annotated[ServerEngineSpec | VllmEngineSpec, Field(discriminator="kind")] = ServerEngineSpec()
    """Who answers: the embedded engine in the server's own process, or vLLM in a process that the server owns."""
    engine_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of the embedded engine."""
    trainer_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of the trainer process. Together they should not exceed the machine's cores."""
    publish_deadline_s: float = Field(default=120.0, gt=0)
    """A version must be served so long after it was sent."""
    trainer_deadline_s: float = Field(default=600.0, gt=0)
    """The trainer process is ended, and started again, when one step, a checkpoint or anything else takes it longer."""
    max_restarts: int = Field(default=20, ge=0)
    """Of the trainer process, with no job done in between; beyond that the server says that it is unfit."""
    updates: UpdatesSpec = UpdatesSpec()
    """How versions lie on the disk, and how many of them."""
    checkpoint: OnlineCheckpointSpec = OnlineCheckpointSpec()
    """When the master's bits and the optimizer go to the disk."""

    @property
    def from_scratch(self) -> bool:
        """Whether the model begins with random weights."""
        return isinstance(self.model, PresetModel) and self.model.warm_start is None

    @model_validator(mode="before")
    @classmethod
    def _kinds_left_out(cls, raw: Any) -> Any:
        """A table that names no kind is of the default one."""
        if not isinstance(raw, dict):
            return raw
        tables = cast("dict[str, Any]", raw)
        for table, key, kind in (
            ("engine", "kind", "server"),
            ("optimizer", "kind", "adamw"),
            ("precision", "weights", "float32"),
        ):
            if isinstance(tables.get(table), dict):
                tables = {**tables, table: {key: kind, **tables[table]}}
        return tables

    @model_validator(mode="after")
    def _fits_together(self) -> OnlineSpec:
        if self.train.lr > self.train.max_lr:
            raise ValueError(
                f"train.lr = {self.train.lr:g} is more than train.max_lr = {self.train.max_lr:g}; raise max_lr"
            )
        if self.train.steps > self.train.max_steps:
            raise ValueError(
                f"train.steps = {self.train.steps} is more than train.max_steps = {self.train.max_steps}; raise it"
            )
        if isinstance(self.precision, Bfloat16Precision) and self.precision.master == "fp32":
            raise ValueError(
                "precision.master = 'fp32': a copy beside the weights would undo a rollback; 'split' keeps the same "
                "numbers in less, and follows one"
            )
        if self.engine.url or self.engine.replicas > 1:
            raise ValueError("engine.url and engine.replicas: an online server has one engine, its own; leave them out")
        return self


def load_online_spec(path: str | Path, overrides: Sequence[str] = ()) -> OnlineSpec:
    """Read a TOML file, apply `key.path=value` overrides, check everything."""
    return parse_online_spec(_merged(read_toml(path), parse_overrides(overrides)))


def as_online_spec(spec: OnlineSpec | Mapping[str, Any] | str | Path) -> OnlineSpec:
    """Return a checked spec: `spec` itself, or what a dict or the TOML file of this path holds."""
    if isinstance(spec, Mapping):
        return parse_online_spec(spec)
    return load_online_spec(spec) if isinstance(spec, str | Path) else spec


def parse_online_spec(raw: Mapping[str, Any]) -> OnlineSpec:
    """Check an online server's spec that is there as a dict."""
    try:
        return OnlineSpec.model_validate(dict(raw))
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'spec'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False)
        ]
        raise SpecError("\n".join(lines)) from error


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in above.items():
        inner = below.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            below[key] = _merged(cast("dict[str, Any]", inner), cast("dict[str, Any]", value))
        else:
            below[key] = value
    return below
