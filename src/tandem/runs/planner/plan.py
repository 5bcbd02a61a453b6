"""`tandem plan`: memory, time and cost of a run before its first second, from the spec and the model's config alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tandem.errors import SpecError
from tandem.ops.counted_shape import CountedShape, Shape
from tandem.ops.parts import BY_COLUMNS
from tandem.runs.planner.calibration import Machine, machine, usd_per_hour
from tandem.runs.planner.lengths import Lengths
from tandem.runs.planner.memory import (
    Phase,
    all_ranks,
    checkpoint_bytes,
    copied_bytes,
    largest_cache_gib,
    largest_micro_tokens,
    needed_gib,
    phases,
    rows_held,
    share_for,
)
from tandem.runs.planner.model_shape import adapter_numbers, read_run
from tandem.runs.planner.rank_share import Rank
from tandem.runs.planner.step_time import Times, times
from tandem.runs.planner.workload import Work, work_of
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.engine_cuts import why_not_cut
from tandem.spec.hardware import HardwareChoice
from tandem.spec.model import LoraSpec
from tandem.spec.optim import ApolloMiniSpec
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.spec.ranks import on_ranks
from tandem.spec.run import RlSpec, RunSpec

_OF_PROFILE = {"laptop": "cpu", "24gb": "4090", "80gb": "h100"}
MOST_RANKS = 8
"""That a plan tries; more are on several hosts, whose link slows them down."""
_OF_EVERY_RANK = ("activations", "logits", "gathered", "in reduction", "engine", "in flight", "process", "freed")
"""Parts that more ranks do not make smaller."""
_WELL_FILLED = 2 / 3
"""Of a micro-batch: less means that it holds one row, and all but holds another."""


@dataclass(frozen=True, slots=True)
class Plan:
    gpu: str
    memory_gib: float
    limit_gib: float
    """Of that, what may be used."""
    fits: bool
    peak_gib: float
    """Of a GPU the most, of which each rank has its own; of a host's memory, what all ranks take together."""
    least_gib: float
    """What it takes whatever a step's tokens are: loading, and weights, state and gradients."""
    ranks: int
    ranks_gib: Sequence[float]
    """Of each rank: the most of its GPU, or of its process."""
    ranks_that_fit: Mapping[int, float]
    """If it does not fit on the GPUs asked for: the smallest number of ranks on which it does, and GiB a rank there."""
    why_no_ranks: str
    """If it fits on no number of ranks: what stands in the way."""
    trainer_gib: float
    """What the run will report as memory/peak: of this process, and on a GPU of what it allocates."""
    parameters: Mapping[str, int]
    phases: Sequence[Phase]
    """Of rank 0."""
    work: Work
    largest_micro_tokens: int
    largest_cache_gib: float
    checkpoint_gib: float
    """Of the disk, for each; 0 if none is saved."""
    copied_gib: float
    """Of the host's memory, kept for checkpoints: on a CPU a part of the phases."""
    bridge: str
    why_bridge: str
    times: Times
    usd: float | None
    """None: the price of the card is not known."""
    changes: Sequence[str]
    """Settings that help if it does not fit, each with its effect."""
    faster: Sequence[str]
    """Settings that leave less of what is there unused."""
    assumed: Sequence[str]
    chosen: Sequence[HardwareChoice] = ()
    """Settings that the spec leaves out, as chosen for this machine."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": self.times.step_s}


def kind_of(spec: RunSpec) -> str:
    """Return the kind of machine that a spec is planned for if none is named."""
    return "cpu" if spec.device == "cpu" else _OF_PROFILE.get(spec.profile, "h200")


def plan_run(
    spec: RunSpec,
    *,
    gpu: str = "",
    prices: Path | None = None,
    memory_gib: float = 0.0,
    prompt_tokens: int = 0,
    row_tokens: int = 0,
    answer_tokens: float = 0.0,
    lengths: Lengths | None = None,
    shape: Shape | None = None,
) -> Plan:
    """`gpu`: a card of cards.toml, or cpu; left out, what `device` and `profile` of the spec say, and an h200 if they
    leave the choice. `shape`: of the model (build/planned_shape.py); left out, NoPlan for a model whose layers are not
    known here."""
    target = machine(gpu or kind_of(spec), memory_gib)
    kind = target.kind
    shape = shape or read_run(spec)
    if spec.parallel.ranks > 1 and (why_not := _why_not_rows(spec, shape)):
        raise SpecError(f"parallel.ranks = {spec.parallel.ranks}: {why_not}")
    attention = spec.model.attention if shape.packs else "sdpa"
    compiled = spec.model.compile and shape.packs and not shape.tower and not shape.recurrent  # model/forward.py
    model = spec.model.model_copy(update={"compile": compiled, "attention": attention})
    spec = spec.model_copy(update={"model": model})

    def work_on(spec: RunSpec) -> Work:
        found = work_of(
            spec, shape, target.answer_share,
            prompt_tokens=prompt_tokens, row_tokens=row_tokens, answer_tokens=answer_tokens, on_gpu=target.on_gpu,
            lengths=lengths,
        )  # fmt: skip
        unknown = (
            "a plan does not know how many images there are, and how large: each adds a token for every "
            f"{shape.pixels} x {shape.pixels} of its pixels, which --row-tokens or --prompt-tokens can count, and "
            "work of the vision tower"
        )
        return replace(found, lengths="assumed", assumed=(*found.assumed, unknown)) if shape.tower else found

    work = work_on(spec)
    of_ranks = [phases(spec, shape, work, target, rank) for rank in all_ranks(spec)]
    found = of_ranks[0]
    peak = needed_gib(spec, shape, work, target)
    took = times(spec, shape, work, target)
    bridge, why = _bridge(spec, shape)
    fits, price = peak <= target.limit_gib, usd_per_hour(kind, prices)
    enough, why_none = ({}, "") if fits or not target.on_gpu else _enough_ranks(spec, shape, work_on, target)
    return Plan(
        gpu=kind,
        memory_gib=target.memory_gib,
        limit_gib=target.limit_gib,
        fits=fits,
        peak_gib=peak,
        least_gib=_least(found) if target.on_gpu else sum(map(_least, of_ranks)),
        ranks=spec.parallel.ranks,
        ranks_gib=[_of_rank(spec, each, target) for each in of_ranks],
        ranks_that_fit=enough,
        why_no_ranks=why_none,
        trainer_gib=_trainer(spec, found, target),
        parameters=_parameters(spec, shape),
        phases=found,
        work=work,
        largest_micro_tokens=largest_micro_tokens(spec, shape, work, target),
        largest_cache_gib=largest_cache_gib(spec, shape, target),
        checkpoint_gib=checkpoint_bytes(spec, shape) / 2**30 if spec.checkpoint.every else 0.0,
        copied_gib=copied_bytes(spec, shape) / 2**30 if spec.checkpoint.every else 0.0,
        bridge=bridge,
        why_bridge=why,
        times=took,
        usd=None if price is None else took.steps_s / 3600 * price * _gpus(spec),
        changes=[] if fits else _changes(spec, shape, work, target),
        faster=_faster(spec, shape, work, target) if fits else [],
        assumed=[
            *work.assumed,
            *_of_counts(shape),
            *_of_arguments(spec),
            *_of_links(spec, target),
            f"constants of '{kind}': {target.source}",
        ],
    )


def _least(found: Sequence[Phase]) -> float:
    train = next(phase for phase in found if phase.name == "train")
    sure = ("weights", "master", "optimizer", "reference", "teacher", "checkpoint", "gradients", "gathered", "process")
    return max(found[0].peak_gib, sum(train.parts.get(name, 0.0) for name in sure))


def _of_rank(spec: RunSpec, found: Sequence[Phase], target: Machine) -> float:
    own = not target.on_gpu and _engine_apart(spec)
    return max(phase.peak_gib - phase.parts.get("engine", 0.0) * own for phase in found)


def _enough_ranks(
    spec: RunSpec, shape: Shape, work_on: Callable[[RunSpec], Work], target: Machine
) -> tuple[dict[int, float], str]:
    """Return the smallest power of two of ranks on which it fits, and GiB a rank; or none, and why."""
    if shape.tower:
        return {}, "one process trains a model that sees images"
    if why_not := _why_not_rows(spec, shape):
        return {}, why_not
    worst: Phase | None = None
    hosts = spec.parallel.hosts
    for count in (2**power for power in range(MOST_RANKS.bit_length())):
        if count == spec.parallel.ranks:
            continue
        try:
            spread = on_ranks(spec, count, 0 if count % (hosts or 1) else hosts, goes_on=False)
        except SpecError as error:
            return {}, "several ranks are refused: " + "; ".join(str(error).splitlines())
        work = work_on(spread)
        gib = needed_gib(spread, shape, work, target)
        if gib <= target.limit_gib:
            return {count: gib}, ""
        worst = max(phases(spread, shape, work, target, Rank.of(spread, 0)), key=lambda phase: phase.peak_gib)
    assert worst is not None
    part, gib = max(worst.parts.items(), key=lambda each: each[1])
    whole = "every rank has all of it" if part in _OF_EVERY_RANK else "each rank has its rows of it"
    return {}, (
        f"on {MOST_RANKS} ranks a rank takes {worst.peak_gib:.1f} GiB, most of it for {part}, {gib:.1f} GiB: {whole}"
    )


def _of_counts(shape: Shape) -> list[str]:
    if not isinstance(shape, CountedShape):
        return []
    found = [
        "activations were counted in a forward pass without values; the seconds were calibrated with dense models, not "
        "with this family"
    ]
    if shape.recurrent:
        found.append(
            "torch computes the recurrent layers, of sequences that have 256 tokens or more: a package's kernels keep "
            "less; shorter sequences may keep more for each token, and a prompt that samples share counts for each"
        )
    return found


def _of_arguments(spec: RunSpec) -> list[str]:
    given = isinstance(spec, RlSpec) and isinstance(spec.engine, VllmEngineSpec) and spec.engine.arguments
    return ["a plan does not read engine.arguments, which may change vLLM's memory and speed"] if given else []


def _why_not_rows(spec: RunSpec, shape: Shape) -> str:
    """Weights that begin with others are whole on every rank first."""
    return shape.why_not_rows if spec.model.warm_start is None else ""


def _of_links(spec: RunSpec, target: Machine) -> list[str]:
    if spec.parallel.ranks == 1:
        return []
    if not target.on_gpu:
        return ["all ranks are on one host, and share its memory"]
    if spec.parallel.ranks > MOST_RANKS and not spec.parallel.hosts:
        return ["rows are cut over all ranks; torchrun cuts them within each host: set parallel.hosts to plan for that"]
    return ["each rank has a GPU of its own; NCCL's buffers, which torch does not count, are not measured"]


def _engine_apart(spec: RunSpec) -> bool:
    """It has a process of its own."""
    return isinstance(spec, RlSpec) and not isinstance(spec.engine, HfEngineSpec)


def _trainer(spec: RunSpec, found: Sequence[Phase], target: Machine) -> float:
    """Up to the last step, which is when the run looks: not what is saved and exported afterwards."""
    apart = _engine_apart(spec)
    if not target.on_gpu:
        steps = (phase for phase in found if phase.name not in ("save", "export"))
        return max(phase.peak_gib - phase.parts.get("engine", 0.0) * apart for phase in steps)
    train = next(phase for phase in found if phase.name == "train")
    return train.peak_gib - train.parts.get("engine", 0.0) * apart - target.context_gib


def _parameters(spec: RunSpec, shape: Shape) -> dict[str, int]:
    adapters = adapter_numbers(shape, spec.model.lora)
    trained = adapters if spec.model.lora else shape.total
    beside = {"vision tower": shape.tower, "adapters": adapters}
    return {**shape.numbers, **beside, "total": shape.held + adapters, "trained": trained}


def _bridge(spec: RunSpec, shape: Shape) -> tuple[str, str]:
    if not isinstance(spec, RlSpec):
        return "none", "nothing is sampled"
    summary, ranks = spec.sync.traits.summary, spec.parallel.ranks
    if ranks == 1 or not spec.sync.traits.shares_memory:
        return spec.sync.bridge, summary
    if isinstance(shape, CountedShape):
        return spec.sync.bridge, f"{summary}; a plan does not know whether several ranks can share this family's memory"
    cut = {name: dims[name in BY_COLUMNS] for name, dims in shape.linears.items()}
    cut |= {name: dims[0] for name, dims in zip(("embedding", "head"), shape.tables, strict=False)}
    if why_not := why_not_cut(ranks, shape.kv_heads, cut, ("embedding", "head")):
        return spec.sync.bridge, f"requested, not engaged: {why_not}; such a run is refused"
    return (
        spec.sync.bridge,
        f"{summary}; engaged: each of {ranks} ranks trains in the memory of vLLM's worker on its GPU",
    )


def _gpus(spec: RunSpec) -> int:
    """Those of an engine on other cards cost as well."""
    engines = spec.engine.numbered_gpus if isinstance(spec, RlSpec) and isinstance(spec.engine, VllmEngineSpec) else ()
    return spec.parallel.ranks + sum(number >= spec.parallel.row_shards for number in engines)


def _faster(spec: RunSpec, shape: Shape, work: Work, target: Machine) -> list[str]:
    """What fits all the same, and why it is slow without."""
    found: list[str] = []

    def offer(changed: RunSpec, work: Work, text: str) -> None:
        if needed_gib(changed, shape, work, target) <= target.limit_gib:
            found.append(text)

    if not isinstance(spec, RlSpec):
        return found
    asked, row = spec.train.micro_tokens, work.micro.tokens
    alone = spec.parallel.num_shares == 1  # otherwise shares decide how much a micro-batch has
    if alone and work.num_micro > 1 and row < _WELL_FILLED * asked:
        text = f"micro-batches have {row:,} of {asked:,} tokens: --set train.micro_tokens={2 * row}"
        offer(spec, work.sized(2 * row), text)
    if (held := rows_held(spec, shape, work, target)) < work.rows:
        few = f"the engine holds keys and values of {held} of {work.rows} sequences"
        engine = spec.engine
        if isinstance(engine, VllmEngineSpec) and (share := share_for(spec, engine, shape, work, target)) < 1:
            changed = spec.model_copy(update={"engine": engine.model_copy(update={"memory_share": share})})
            offer(changed, work, f"{few}: --set engine.memory_share={share:g}")
        elif isinstance(engine, HfEngineSpec | ServerEngineSpec):
            kv_gib = math.ceil(engine.kv_gib * work.rows / held)
            changed = spec.model_copy(update={"engine": engine.model_copy(update={"kv_gib": float(kv_gib)})})
            offer(changed, work, f"{few}: --set engine.kv_gib={kv_gib}")
    return found


def _changes(spec: RunSpec, shape: Shape, work: Work, target: Machine) -> list[str]:
    """Each alone, those that free most first; and if none is enough, several together."""
    before = needed_gib(spec, shape, work, target)
    found: list[tuple[float, str]] = []
    fitting = largest_micro_tokens(spec, shape, work, target)
    if work.row_tokens <= fitting < work.micro.tokens:
        found.append(_effect(spec, shape, work.sized(fitting), target, f"train.micro_tokens={fitting}"))
    for setting, changed in _alternatives(spec):
        found.append(_effect(changed, shape, work, target, setting))
    useful = sorted((peak, text) for peak, text in found if peak < before - 0.01)
    told = [_told(peak, text, target) for peak, text in useful]
    if all(peak > target.limit_gib for peak, _ in useful):
        told += _together(spec, shape, work, target)
    return told


def _together(spec: RunSpec, shape: Shape, work: Work, target: Machine) -> list[str]:
    """As many of the settings as it takes, the last ones beside a smaller micro-batch."""
    settings: list[str] = []
    while (left := _alternatives(spec)) and len(settings) < 4:
        tried = [(*_effect(changed, shape, work, target, setting), changed) for setting, changed in left]
        peak, setting, spec = min(tried, key=lambda each: each[0])
        settings.append(setting)
        smaller = work.sized(min(work.micro.tokens, largest_micro_tokens(spec, shape, work, target)))
        if peak > target.limit_gib and smaller.micro.tokens >= work.row_tokens:
            peak, setting = _effect(spec, shape, smaller, target, f"train.micro_tokens={smaller.micro.tokens}")
            settings.append(setting)
        if peak <= target.limit_gib:
            return [_told(peak, " --set ".join(settings), target)]
    return []


def _told(peak: float, text: str, target: Machine) -> str:
    return f"--set {text}: {peak:.2f} GiB{', which fits' * (peak <= target.limit_gib)}"


def _effect(spec: RunSpec, shape: Shape, work: Work, target: Machine, text: str) -> tuple[float, str]:
    return needed_gib(spec, shape, work, target), text


def _alternatives(spec: RunSpec) -> list[tuple[str, RunSpec]]:
    found: list[tuple[str, RunSpec]] = []

    def offer(setting: str, **changed: Any) -> None:
        found.append((setting, spec.model_copy(update=changed)))

    model, train = spec.model, spec.train
    kinds = ("keep", "selective", "recompute")
    if model.activations in kinds:
        for kind in kinds[kinds.index(model.activations) + 1 :]:
            offer(f"model.activations={kind}", model=model.model_copy(update={"activations": kind}))
    if isinstance(spec.precision, Float32Precision):
        offer("precision.weights=bfloat16", precision=Bfloat16Precision())
    if model.lora is None and train.optimizer.kind != "apollo_mini" and spec.parallel.ranks == 1:
        offer("train.optimizer.kind=apollo_mini", train=train.model_copy(update={"optimizer": ApolloMiniSpec()}))
    if model.lora is None and not (isinstance(spec, RlSpec) and spec.sync.traits.shares_memory):
        adapted = model.model_copy(update={"lora": LoraSpec()})
        offer("model.lora.rank=16", model=adapted)
    if isinstance(spec, RlSpec) and isinstance(spec.engine, VllmEngineSpec) and spec.engine.memory_share > 0.3:
        offer("engine.memory_share=0.3", engine=spec.engine.model_copy(update={"memory_share": 0.3}))
    return found
