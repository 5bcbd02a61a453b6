"""Settings that a user leaves out, chosen for the machine. Explicit settings win, and a resumed run keeps what it began
with: its spec.toml leaves nothing out.

docs/defaults.md has the choices as a table; they are those of the tuned rows of docs/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from tandem.errors import SpecError
from tandem.spec.bridges import DISK
from tandem.spec.engine import HfEngineSpec
from tandem.spec.load import parse_spec
from tandem.spec.model import PresetModel
from tandem.spec.pairing import VLLM_RANK, usual_bridge
from tandem.spec.run import RlSpec, RunSpec

_PAYS_OFF_STEPS = 30
"""Steps that pay for compiling, which takes up to a minute."""
_LARGE_GIB, _WHOLE_GIB = 38.0, 75.0
"""Below what cards of 40 and 80 GiB report."""
_MOST_RUNNING = 512
_SMALL, _SHORT = 200_000_000, 64
"""Weights, and tokens of an answer, up to which the embedded engine was measured to be faster than vLLM."""
_SHARED_BY_ENGINES = {"max_running", "max_context", "deadline_s"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the trainer runs on. `vllm`: whether the environment of `tandem engine install vllm` is there."""

    kind: Literal["cpu", "cuda"]
    card: str = ""
    memory_gib: float = 0.0
    bf16: bool = True
    """Whether the card computes in bfloat16."""
    vllm: bool = False


PROFILES: Mapping[str, Hardware] = {
    "laptop": Hardware("cpu"),
    "24gb": Hardware("cuda", "a GPU of 24 GiB", 24.0),
    "80gb": Hardware("cuda", "a GPU of 80 GiB", 80.0),
}


@dataclass(frozen=True, slots=True)
class HardwareChoice:
    """A setting that the user left out, what was chosen for it, and why."""

    setting: str
    chosen: Any
    why: str


def choose(
    spec: RunSpec, machine: Hardware, *, sees: bool = False, weights: int = 0
) -> tuple[RunSpec, list[HardwareChoice]]:
    """Return the spec with a value in place of each setting that was left out and that depends on the machine, and the
    choices. On a CPU, and for a model from scratch, the spec itself. `sees`: the model is one that sees images.
    `weights`: how many it has; 0: not known."""
    if (named := PROFILES.get(spec.profile)) is not None:
        if named.kind == "cuda" and machine.kind == "cpu":
            raise SpecError(
                f"profile = '{spec.profile}': is for a GPU, and there is none; leave it out, or set 'laptop'"
            )
        machine = replace(named, vllm=machine.vllm)
    if machine.kind == "cpu" or isinstance(spec.model, PresetModel):
        on_cpu = spec.profile == "laptop" and spec.left_out("device")
        choices = [HardwareChoice("device", "cpu", "profile = 'laptop'")] if on_cpu else []
        why = "for a CPU" if machine.kind == "cpu" else "a model from scratch is small"
        return spec.changed({"device": "cpu"}) if on_cpu else spec, [*choices, *_as_they_are(spec, why)]
    choices = _Choices(spec, machine, sees, weights)
    choices.numbers()
    choices.memory()
    if isinstance(spec, RlSpec):
        choices.engine(spec)
        choices.bridge()
    else:
        choices.put("deterministic", False, "a GPU's kernels are faster if they need not give equal bytes")
    return parse_spec(choices.tables), choices.made


def micro_tokens(memory_gib: float) -> int:
    """Return the most tokens of one pass on a GPU of this memory."""
    limits = ((14.0, 2048), (_LARGE_GIB, 4096), (_WHOLE_GIB, 8192))
    return next((tokens for below, tokens in limits if memory_gib < below), 16384)


def choices_text(choices: Sequence[HardwareChoice]) -> list[str]:
    """Return a line for each reason: the settings that were left out, what was chosen, and why."""
    return [
        f"left out: {', '.join(f'{each.setting} = {_shown(each.chosen)}' for each in found)}: {why}"
        for why, found in groupby(choices, lambda each: each.why)
    ]


def _scores(spec: RunSpec) -> bool:
    return spec.algorithm is not None and spec.algorithm.kind == "reward_model"


def _as_they_are(spec: RunSpec, why: str) -> list[HardwareChoice]:
    """Return the choices of a machine for which the defaults of docs/spec.md are right."""
    usual: dict[str, Any] = {"precision.weights": spec.precision.weights, "model.attention": spec.model.attention}
    if isinstance(spec, RlSpec):
        usual["engine.kind"] = spec.engine.kind
        if spec.engine.kind != "hf":
            usual["sync.bridge"] = spec.sync.bridge
    return [HardwareChoice(setting, value, why) for setting, value in usual.items() if spec.left_out(setting)]


class _Choices:
    """The tables of a spec while settings that were left out are filled in."""

    def __init__(self, spec: RunSpec, machine: Hardware, sees: bool, weights: int) -> None:
        self._spec, self._machine, self._sees, self._weights = spec, machine, sees, weights
        self.tables: dict[str, Any] = spec.as_written()
        self.made: list[HardwareChoice] = []

    def put(self, setting: str, value: Any, why: str) -> None:
        if not self._spec.left_out(setting):
            return
        table, (*tables, name) = self.tables, setting.split(".")
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
        self.made.append(HardwareChoice(setting, value, why))

    def numbers(self) -> None:
        """Choose the type of the weights, the attention and whether layers are compiled."""
        spec, machine = self._spec, self._machine
        if machine.bf16:
            self.put("precision.weights", "bfloat16", f"{machine.card} computes in 16 bits, and no update is lost")
        else:
            self.put("precision.weights", "float32", f"{machine.card} does not compute in bfloat16")
        quantised = spec.model.lora is not None and spec.model.lora.base != "exact"
        why_not = (
            "the kernel for packed rows needs 16 bits" if self.tables["precision"]["weights"] != "bfloat16"
            else "the base is quantised" if quantised
            else "a reward model has no lm-head to try packed rows on" if _scores(spec)
            else ""
        )  # fmt: skip
        packed = "rows need no mask and no padding"
        self.put("model.attention", "sdpa" if why_not else "packed", why_not or packed)
        if self.tables["model"]["attention"] == "packed":
            few = f"{spec.train.steps} steps do not pay for compiling" if spec.train.steps < _PAYS_OFF_STEPS else ""
            why_not = "a model that sees images is not compiled" if self._sees else few
            self.put("model.compile", not why_not, why_not or "faster steps, after a start of up to a minute")

    def memory(self) -> None:
        """Choose what bounds the memory of a step."""
        gib = self._machine.memory_gib
        why = f"{gib:.0f} GiB of memory"
        self.put("model.activations", "selective" if gib >= _LARGE_GIB else "recompute", why)
        for stage in ("train", "warmup"):
            if getattr(self._spec, stage, None) is not None:
                self.put(f"{stage}.micro_tokens", micro_tokens(gib), why)

    def engine(self, spec: RlSpec) -> None:
        """Choose the engine, and its part of the GPU."""
        if spec.left_out("engine.kind"):
            self._engine_kind(spec)
        engine = self.tables["engine"]
        if engine["kind"] not in ("hf", "vllm") or engine.get("url"):
            return
        sequences = spec.train.groups_per_step * spec.train.group_size
        if sequences > HfEngineSpec().max_running:
            self.put("engine.max_running", min(_MOST_RUNNING, sequences), f"a step has {sequences} answers")
        if engine["kind"] == "hf":
            return
        if engine.get("gpus", []) in ([], [0]):
            share = 0.3 if self._machine.memory_gib >= _LARGE_GIB else 0.45
            self.put("engine.memory_share", share, "the trainer is on the same GPU")
        if spec.train.max_lag:
            self.put("deterministic", False, "sampling and training may overlap; a GPU gives no equal bytes anyway")

    def _engine_kind(self, spec: RlSpec) -> None:
        lora = spec.model.lora
        of_hf = sorted(self.tables.get("engine", {}).keys() - _SHARED_BY_ENGINES - {"kind"})
        why_not = (
            "vLLM is not installed (`tandem engine install vllm`), with which sampling is many times as fast"
            if not self._machine.vllm
            else f"engine.{of_hf[0]} is a setting of the embedded engine" if of_hf
            else "vLLM would hold the quantised base once more, unquantised" if lora and lora.base != "exact"
            else f"vLLM serves adapters of rank {VLLM_RANK} at most" if lora and lora.rank > VLLM_RANK
            else "the embedded engine samples short answers of a small model faster than vLLM" if self._is_short(spec)
            else ""
        )  # fmt: skip
        why = why_not or "vLLM is installed, and samples many times as fast as the embedded engine"
        self.put("engine.kind", "hf" if why_not else "vllm", why)

    def _is_short(self, spec: RlSpec) -> bool:
        """Whether sending requests to another process takes longer than sampling, and nothing is trained meanwhile.
        Adapters were not measured."""
        small = 0 < self._weights <= _SMALL and spec.train.max_tokens <= _SHORT
        return small and not spec.train.max_lag and spec.parallel.ranks == 1 and spec.model.lora is None

    def bridge(self) -> None:
        bridge = usual_bridge(self.tables)
        if self._sees and bridge.shares_memory:
            bridge = DISK
        if bridge.engine_end != "module":
            self.put("sync.bridge", bridge.name, bridge.summary)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
