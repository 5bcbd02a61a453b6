"""The spec of `tandem online serve`: the model, its engine, and how the server trains and publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from tandem.errors import SpecError
from tandem.spec.base import Spec
from tandem.spec.engine import ServerEngineSpec, VllmEngineSpec
from tandem.spec.load import parse_overrides, plain_message
from tandem.spec.model import ModelSpec, PresetModel
from tandem.spec.online_gates import GateSpec, OrdinarySpec, ReplaySpec, UpdatesSpec, WatchSpec
from tandem.spec.optim import AdamWSpec, OptimizerSpec
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.spec.toml import read_toml


class TeachSpec(Spec):
    """`[train]`: defaults and limits of a training job."""

    parts: Literal["auto", "all", "down"] = "auto"
    """Which weights are trained. down: the down projections (`down_proj`) of the middle layers' MLPs, which are enough
    for facts and change other answers little. all: every weight. auto: down for a pretrained model that has such
    layers, all for a model made from scratch. With `model.lora` the adapters are trained instead."""
    lr: float = Field(default=1e-4, gt=0, lt=1)
    """Learning rate of a job that names none. The default suits `parts` = down and adapters. To train all weights of a
    pretrained model, set a fifth of it; for a model made from scratch, ten times as much."""
    max_lr: float = Field(default=1e-2, gt=0, lt=1)
    """Largest learning rate that a job may name."""
    steps: int = Field(default=60, ge=1)
    """Most optimizer steps of a job that names no number; `known` may end it earlier."""
    max_steps: int = Field(default=1000, ge=1)
    """Most optimizer steps that a job may name."""
    known: float = Field(default=0.7, ge=0, lt=1)
    """An `sft` job that names no steps ends as soon as every trained token has at least this probability; 0: it
    always takes `steps` steps."""
    batch_size: int = Field(default=32, ge=1)
    """Samples (or pairs, or groups) per step; replayed and ordinary samples are added to these."""
    max_samples: int = Field(default=4096, ge=1)
    """Most samples in one job."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; a larger gradient is scaled down."""
    micro_tokens: int = Field(default=8192, ge=16)
    """Most tokens in one forward and backward pass."""
    context_grad: Literal["full", "none"] = "full"
    """none: the tokens before the first trained one have no gradient. This is cheaper and leaves the forward pass
    unchanged, but the gradient lacks their contribution."""
    attempts: int = Field(default=3, ge=1, le=10)
    """A job fails after the trainer died this many times while it ran."""


class OnlineCheckpointSpec(Spec):
    """`[checkpoint]`: when to save master weights and optimizer state, besides the versions, which are always saved."""

    every_s: float = Field(default=600.0, gt=0)
    """Seconds between two checkpoints, if a version was published since the last one."""
    at_shutdown: bool = True
    """Also save a checkpoint when the server shuts down."""


class OnlineSpec(Spec):
    """A server that trains its model while it answers."""

    name: str = Field(default="online", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the model in requests."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of random weights, data order and replay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engine; auto: a GPU if there is one."""
    model: ModelSpec
    """Which weights are loaded, and which of them are trained."""
    precision: PrecisionSpec = Float32Precision()
    """Bits of the weights, and how the bits that they lack are kept."""
    optimizer: OptimizerSpec = AdamWSpec()
    """The optimizer with its settings; its state persists with the server's data."""
    train: TeachSpec = TeachSpec()
    """Defaults and limits of a training job."""
    gates: GateSpec = GateSpec()
    """Checks that a candidate must pass before it is published."""
    replay: ReplaySpec = ReplaySpec()
    """Earlier samples that are trained again together with new ones."""
    ordinary: OrdinarySpec = OrdinarySpec()
    """Prompts unrelated to any job, whose answers should not change."""
    watch: WatchSpec | None = None
    """A metric that rolls back a version when it falls. Left out: none."""
    feedback: bool = False
    """Keep each chat in `feedback/` of the data directory, up to 1 GiB, and take thumbs for its id at /v1/feedback."""
    engine: Annotated[ServerEngineSpec | VllmEngineSpec, Field(discriminator="kind")] = ServerEngineSpec()
    """The engine that answers: the embedded one in the server's process, or vLLM in a process that the server owns."""
    engine_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of the embedded engine."""
    trainer_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of the trainer process. Together with `engine_threads` at most the machine's cores."""
    publish_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds from sending a version until the engine must serve it."""
    trainer_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for one step, checkpoint or other task of the trainer process; the server restarts a slower one."""
    max_restarts: int = Field(default=20, ge=0)
    """Restarts of the trainer process without a finished job in between; after more, the server reports not ready."""
    updates: UpdatesSpec = UpdatesSpec()
    """How versions are stored on disk, and how many are kept."""
    checkpoint: OnlineCheckpointSpec = OnlineCheckpointSpec()
    """When master weights and optimizer state are saved."""

    @property
    def from_scratch(self) -> bool:
        """Return whether the model begins with random weights."""
        return isinstance(self.model, PresetModel) and self.model.warm_start is None

    @model_validator(mode="before")
    @classmethod
    def _kinds_left_out(cls, raw: Any) -> Any:
        """Set the default kind in tables that name none."""
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
                f"train.lr = {self.train.lr:g}: must be at most train.max_lr = {self.train.max_lr:g}; raise max_lr"
            )
        if self.train.steps > self.train.max_steps:
            raise ValueError(
                f"train.steps = {self.train.steps}: must be at most train.max_steps = {self.train.max_steps}; raise "
                "max_steps"
            )
        if isinstance(self.precision, Bfloat16Precision) and self.precision.master == "fp32":
            raise ValueError(
                "precision.master = 'fp32': the copy would undo a rollback; choose 'split', which gives the same "
                "results in less memory and follows rollbacks"
            )
        if self.engine.url or self.engine.replicas > 1:
            raise ValueError(
                "engine.url, engine.replicas: an online server starts its own single engine; leave both out"
            )
        return self


def load_online_spec(path: str | Path, overrides: Sequence[str] = ()) -> OnlineSpec:
    """Read a TOML file, apply `key.path=value` overrides and check the spec."""
    return parse_online_spec(_merged(read_toml(path), parse_overrides(overrides)))


def as_online_spec(spec: OnlineSpec | Mapping[str, Any] | str | Path) -> OnlineSpec:
    """Return a checked spec: `spec` itself, or the one in a dict or in the TOML file of this path."""
    if isinstance(spec, Mapping):
        return parse_online_spec(spec)
    return load_online_spec(spec) if isinstance(spec, str | Path) else spec


def parse_online_spec(raw: Mapping[str, Any]) -> OnlineSpec:
    """Check an online server's spec given as a dict."""
    try:
        return OnlineSpec.model_validate(dict(raw))
    except ValidationError as error:
        lines: list[str] = []
        for item in error.errors(include_url=False):
            field, message = ".".join(str(part) for part in item["loc"]), plain_message(item)
            lines.append(f"{field}: {message}" if field else message)
        raise SpecError("\n".join(lines)) from error


def _merged(tables: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in overrides.items():
        inner = tables.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            tables[key] = _merged(cast("dict[str, Any]", inner), cast("dict[str, Any]", value))
        else:
            tables[key] = value
    return tables
