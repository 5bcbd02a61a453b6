"""The spec of a whole run: `recipe = "rl"`, `"sft"` or `"preference"`, and checks across its tables."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, field_validator, model_validator

from tandem.spec.algorithm import AlgorithmSpec, DapoSpec, DistillSpec, DrGrpoSpec, uses_reference
from tandem.spec.artifacts import ArtifactsSpec
from tandem.spec.base import LocalPath, Spec
from tandem.spec.checkpoint import CheckpointSpec
from tandem.spec.data import Demonstrations, RecordedData, with_kind
from tandem.spec.engine import EngineSpec, HfEngineSpec
from tandem.spec.environment import EnvironmentSpec, mixed, only_scores, packages_in
from tandem.spec.evaluation import EvalSpec, LossEvalSpec
from tandem.spec.liveness import LivenessSpec
from tandem.spec.model import ModelSpec, PresetModel
from tandem.spec.own import OwnAlgorithmSpec, OwnName, as_own, check_recorded
from tandem.spec.pairing import check_shared_ranks, check_sync, usual_bridge
from tandem.spec.parallel import ParallelSpec, check_parallel
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.spec.preference import DpoSpec, PreferenceAlgorithm, PreferenceStage, RewardModelSpec
from tandem.spec.rollouts import AtroposRollouts, LocalRollouts, RolloutsSpec
from tandem.spec.samples import SamplesSpec
from tandem.spec.sweep import SweepSpec
from tandem.spec.sync import DEFAULT_SYNC, SyncSpec
from tandem.spec.track import TrackSpec
from tandem.spec.train import RlStage, SftStage, Stage, WarmupStage

_MOST_WORKERS = 16  # of `prompts` without `workers`: they only score, and each takes a few MB


class _RunSpecBase(Spec):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run; its directory is runs/<name>-<time>."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of random weights, data order, tasks and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer; auto: a GPU if there is one."""
    profile: Literal["auto", "laptop", "24gb", "80gb"] = "auto"
    """The machine for which settings that are left out are chosen. auto: this one. laptop: a CPU. 24gb, 80gb: a GPU of
    that many GiB. docs/defaults.md lists what is chosen."""
    deterministic: bool = True
    """The same spec and seed give the same bytes; docs/concepts.md says what that costs."""
    strict: bool = False
    """true: the run ends if something that the spec asks for is not available. false: the run reports it and goes on.
    What Tandem chooses by itself, and a field that is left out, is always reported only."""
    model: ModelSpec
    """Which weights are loaded, and which of them are trained."""
    liveness: LivenessSpec = LivenessSpec()
    """After how many seconds without progress the run counts as stalled."""
    track: TrackSpec | None = None
    """Trackers that receive every step's metrics. Left out: none."""
    callbacks: Annotated[tuple[OwnName, ...], Field(strict=False), LocalPath("file:Class")] = ()
    """Classes of your own that are called after every step, as `file.py:Class`, in this order."""
    precision: PrecisionSpec = Float32Precision()
    """Bits of the weights, and how the bits that they lack are kept."""
    parallel: ParallelSpec = ParallelSpec()
    """How many processes train, and how they share the work."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the run saves its state, and which checkpoints it keeps."""
    artifacts: ArtifactsSpec | None = None
    """Where copies of the run go. Left out: nowhere."""
    sweep: SweepSpec | None = None
    """The values and seeds of `tandem sweep`. `tandem train` takes one run and refuses it."""

    @field_validator("device", mode="before")
    @classmethod
    def _no_mps(cls, device: Any) -> Any:
        if device == "mps":
            raise ValueError("sampling and training use 64-bit numbers, which a Mac's GPU does not have; set 'cpu'")
        return device

    @model_validator(mode="before")
    @classmethod
    def _data_kind_left_out(cls, raw: Any) -> Any:
        """Set the kind of a `[data]` table by what it names."""
        if not isinstance(raw, dict):
            return raw
        tables = dict(cast("dict[str, Any]", raw))
        if "data" in tables:
            tables["data"] = with_kind(tables["data"])
        if isinstance(tables.get("warmup"), dict) and "data" in tables["warmup"]:
            tables["warmup"] = {**tables["warmup"], "data": with_kind(tables["warmup"]["data"])}
        return tables

    @model_validator(mode="after")
    def _model_fits(self) -> Self:
        _check_precision(self.precision, self.model)
        lora = self.model.lora
        if lora is not None and lora.base != "exact" and isinstance(self.model, PresetModel):
            raise ValueError(
                f"model.lora.base = '{lora.base}': needs model.path; model.preset = '{self.model.preset}' has random "
                "weights, which are not quantised; set model.path to an existing model, or leave base out"
            )
        return self


class RlSpec(_RunSpecBase):
    """Reinforcement learning on an environment, with an optional supervised stage before it."""

    recipe: Literal["rl"] = "rl"
    environment: EnvironmentSpec | None = None
    """The source of tasks and rewards, or several. Only runs whose `rollouts` come from elsewhere leave it out."""
    warmup: WarmupStage | None = None
    """Supervised steps before RL. Left out: none."""
    train: RlStage
    """The RL steps."""
    algorithm: AlgorithmSpec = DrGrpoSpec()
    """How rewards become a gradient."""
    engine: EngineSpec = HfEngineSpec()
    """The engine that samples tokens."""
    sync: SyncSpec = DEFAULT_SYNC
    """How a version reaches the engine."""
    rollouts: RolloutsSpec = LocalRollouts()
    """Where episodes are played."""
    eval: EvalSpec = EvalSpec()
    """How the run is evaluated."""
    samples: SamplesSpec = SamplesSpec()
    """Which answers of the training steps are kept as text."""

    @property
    def stages(self) -> dict[str, Stage]:
        """Return the stages that take optimizer steps, by name, in order."""
        return {"train": self.train} if self.warmup is None else {"warmup": self.warmup, "train": self.train}

    @model_validator(mode="wrap")
    @classmethod
    def _kinds_left_out(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Set the kinds that the tables leave out, and remember that they were left out."""
        if not isinstance(raw, dict):
            return handler(raw)
        written = tables = cast("dict[str, Any]", raw)
        if isinstance(tables.get("environment"), list):
            tables = {**tables, "environment": mixed(tables["environment"])}
        if isinstance(tables.get("engine"), dict):
            tables = {**tables, "engine": {"kind": "hf", **tables["engine"]}}
        if isinstance(sync := tables.get("sync", {}), dict):
            tables = {**tables, "sync": {"bridge": usual_bridge(tables).name, **sync}}
        spec = handler(_workers_left_out(tables))
        for table, tag in (("engine", "kind"), ("sync", "bridge")):
            if table not in written:
                spec.model_fields_set.discard(table)
            elif isinstance(written[table], dict) and tag not in written[table]:
                getattr(spec, table).model_fields_set.discard(tag)
        return spec

    @model_validator(mode="after")
    def _fits_together(self) -> RlSpec:
        if self.sync.every > self.train.max_lag + 1:
            raise ValueError(
                f"sync.every = {self.sync.every}: groups would wait longer than train.max_lag = {self.train.max_lag} "
                f"allows; set sync.every to at most {self.train.max_lag + 1}, or train.max_lag to at least "
                f"{self.sync.every - 1}"
            )
        self._check_environment()
        check_sync(self.sync, self.engine, self.model, self.precision, self.stages, self.parallel.ranks)
        if not isinstance(self.rollouts, LocalRollouts) and isinstance(self.engine, HfEngineSpec):
            raise ValueError(
                f"rollouts.kind = '{self.rollouts.kind}': environments in other processes cannot reach engine.kind = "
                "'hf', which runs inside the trainer; set engine.kind = 'server' or 'vllm'"
            )
        if self.train.thinking_length_penalty and not self.model.thinking:
            raise ValueError(
                f"train.thinking_length_penalty = {self.train.thinking_length_penalty:g}: has no effect while "
                "model.thinking = false; set model.thinking = true, or leave the penalty out"
            )
        _check_stage("train", self.train, self.model)
        if self.warmup is not None:
            _check_stage("warmup", self.warmup, self.model)
        _check_algorithm(self.algorithm, self.train)
        check_parallel(self.parallel, self.model, self.stages)
        if self.parallel.ranks > 1:
            self._check_ranks()
        return self

    def _check_ranks(self) -> None:
        """Raise ValueError for what RL cannot do yet with a trainer of several ranks."""
        ranks = self.parallel.ranks
        if isinstance(self.engine, HfEngineSpec):
            raise ValueError(
                f"engine.kind = 'hf': runs inside one process on the trainer's own module, and parallel.ranks = "
                f"{ranks}; set engine.kind = 'server' or 'vllm', with sync.bridge = 'broadcast', or parallel.ranks = "
                "1, as a model that sees images needs"
            )
        by_adapter = self.sync.traits.carries == "adapter"
        if self.model.lora is not None and not by_adapter:
            raise ValueError(
                f"sync.bridge = '{self.sync.bridge}': with parallel.ranks = {ranks} adapters are sent as they are, not "
                "merged; choose 'adapter' or 'adapter_broadcast'"
            )
        if self.sync.traits.shares_memory:
            check_shared_ranks(self.parallel, self.engine, self.stages)
        if getattr(self.sync, "backend", "") == "ipc" and not by_adapter:
            raise ValueError(
                f"sync.backend = 'ipc': shared memory belongs to one process, and parallel.ranks = {ranks}; choose "
                "'nccl' or 'gloo', or leave it out"
            )
        if isinstance(self.algorithm, DistillSpec) and not self.algorithm.is_served:
            raise ValueError(
                f"algorithm.kind = 'distill': its teacher runs in one process, and parallel.ranks = {ranks}; set "
                "parallel.ranks = 1, or serve the teacher and give its URL: algorithm.teacher = 'http://host:8000/v1'"
            )
        if isinstance(self.rollouts, AtroposRollouts):
            raise ValueError(
                f"rollouts.kind = 'atropos': its trainer is one process, and parallel.ranks = {ranks}; set "
                "parallel.ranks = 1"
            )

    def _check_environment(self) -> None:
        """Raise ValueError if the environment is missing although the run needs it."""
        if self.environment is not None:
            return
        if isinstance(self.rollouts, LocalRollouts):
            raise ValueError(
                "environment: is missing; add it, as in environment.name = 'sort' or another of `tandem env list`"
            )
        if self.eval.every:
            raise ValueError(
                f"eval.every = {self.eval.every}: evaluations need an environment; add [environment], or leave "
                "eval.every out"
            )
        if self.warmup is not None and isinstance(self.warmup.data, Demonstrations):
            raise ValueError(
                "warmup.data.kind = 'demonstrations': demonstrations come from an environment; add [environment], or "
                "warm up on recorded data"
            )


def _workers_left_out(tables: dict[str, Any]) -> dict[str, Any]:
    """Set the workers of environments that only score, so that a slow or crashing score cannot hurt the trainer; and of
    packages, which play in workers only."""
    if not all(isinstance(tables.get(name), dict) for name in ("environment", "train")):
        return tables
    environment: dict[str, Any] = tables["environment"]
    train: dict[str, Any] = tables["train"]
    groups, size = train.get("groups_per_step"), train.get("group_size")
    named = environment.get("name"), environment.get("params")
    if "workers" in environment or not (only_scores(*named) or packages_in(*named)):
        return tables
    if not isinstance(groups, int) or not isinstance(size, int):
        return tables  # refused later
    return {**tables, "environment": {**environment, "workers": min(_MOST_WORKERS, max(1, groups * size))}}


def _own_only(raw: Any) -> Any:
    told = as_own(raw)
    table = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    if (kind := table.get("kind", "own")) != "own":
        raise ValueError(
            f"kind = '{kind}' is unknown here: recipe = 'sft' imitates every conversation; leave [algorithm] out, or "
            "name a loss of your own: name = 'mine.py:loss'"
        )
    return cast("Any", told)


class SftSpec(_RunSpecBase):
    """Supervised training on recorded conversations (SFT)."""

    recipe: Literal["sft"] = "sft"
    data: RecordedData
    """The conversations to train on."""
    train: SftStage
    """The supervised steps."""
    algorithm: Annotated[OwnAlgorithmSpec | None, BeforeValidator(_own_only)] = None
    """A loss of your own. Left out: every trained token of a conversation counts alike."""
    eval: LossEvalSpec = LossEvalSpec()
    """How the run is evaluated."""

    @model_validator(mode="after")
    def _fits_together(self) -> SftSpec:
        if self.algorithm is not None:
            check_recorded(self.algorithm)
        _check_stage("train", self.train, self.model)
        check_parallel(self.parallel, self.model, {"train": self.train})
        return self


class PreferenceSpec(_RunSpecBase):
    """Training on recorded answers that were compared (DPO, ORPO) or labelled good or bad (KTO)."""

    recipe: Literal["preference"] = "preference"
    data: RecordedData
    """Rows with `prompt`, `chosen` and `rejected`; for `kto` a conversation with a `label`."""
    train: PreferenceStage
    """The training steps."""
    algorithm: PreferenceAlgorithm = DpoSpec()
    """How a pair, or an answer with its label, becomes a gradient."""
    eval: LossEvalSpec = LossEvalSpec()
    """How the run is evaluated."""

    @model_validator(mode="after")
    def _fits_together(self) -> PreferenceSpec:
        _check_stage("train", self.train, self.model)
        check_parallel(self.parallel, self.model, {"train": self.train})
        if isinstance(self.algorithm, RewardModelSpec):
            _check_reward_model(self.model, self.parallel)
        if isinstance(self.algorithm, OwnAlgorithmSpec):
            check_recorded(self.algorithm)
            if not self.algorithm.name:
                raise ValueError("algorithm.name: is missing; name the loss of a pair, as path/to/file.py:function")
        return self


def _check_precision(precision: PrecisionSpec, model: ModelSpec) -> None:
    if isinstance(precision, Bfloat16Precision) and precision.master != "split" and model.lora is not None:
        raise ValueError(
            f"precision.master = '{precision.master}': has no effect with [model.lora], whose adapters are "
            "float32; leave master out"
        )


def _check_reward_model(model: ModelSpec, parallel: ParallelSpec) -> None:
    """Raise ValueError for what a model with a score in the place of its lm-head cannot do yet."""
    kind = "algorithm.kind = 'reward_model'"
    if model.lora is not None:
        raise ValueError(f"model.lora: {kind} trains all weights, its head among them; leave [model.lora] out")
    if model.attention == "packed":
        raise ValueError(f"model.attention = 'packed': is tried on an lm-head, and {kind} has none; set 'sdpa'")
    if parallel.num_shares > 1:
        written = f"parallel.{'shares' if parallel.shares else 'ranks'} = {parallel.num_shares}"
        raise ValueError(f"{written}: {kind} trains in one process; leave [parallel] out")


def _check_stage(name: str, stage: Stage, model: ModelSpec) -> None:
    if stage.schedule.warmup_steps >= stage.steps:
        raise ValueError(
            f"{name}.schedule.warmup_steps = {stage.schedule.warmup_steps}: must be below {name}.steps = "
            f"{stage.steps}; lower it, or raise {name}.steps"
        )
    if stage.lora_plus != 1 and model.lora is None:
        raise ValueError(f"{name}.lora_plus = {stage.lora_plus:g}: needs adapters; add [model.lora], or leave it out")


def _check_algorithm(algorithm: AlgorithmSpec, stage: RlStage) -> None:
    if isinstance(algorithm, DapoSpec) and algorithm.overlong_buffer > stage.max_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer}: must be at most train.max_tokens = "
            f"{stage.max_tokens}, the longest answer"
        )
    needs_unequal = not isinstance(algorithm, DistillSpec) and getattr(algorithm, "baseline", "") != "none"
    if stage.replace_equal_groups and not needs_unequal:
        raise ValueError(
            f"train.replace_equal_groups = {stage.replace_equal_groups}: '{algorithm.kind}' also learns from groups "
            "with equal rewards, so no group would be replaced; leave it out"
        )
    if isinstance(algorithm, DistillSpec) and algorithm.is_served and stage.temperature != 1:
        raise ValueError(
            f"train.temperature = {stage.temperature:g}: a served teacher gives logprobs at temperature 1; set "
            "temperature = 1, or load the teacher in this run: algorithm.teacher = a directory or hub id"
        )
    if stage.top_p < 1 and (isinstance(algorithm, DistillSpec) or uses_reference(algorithm)):
        raise ValueError(
            f"train.top_p = {stage.top_p:g}: a token outside the reference's own nucleus has an infinite KL; "
            "set top_p = 1, or leave out the KL term or the teacher"
        )


RunSpec = Annotated[RlSpec | SftSpec | PreferenceSpec, Field(discriminator="recipe")]
