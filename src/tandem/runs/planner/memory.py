"""GiB by component over the phases of a run, from shapes alone. The sums are ops/byte_sizes.py's, as at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from tandem.io import own_code
from tandem.ops import byte_sizes, owner_rounds
from tandem.ops.activation_sizes import activation_bytes, backward_bytes
from tandem.ops.byte_sizes import Dims
from tandem.ops.counted_shape import Shape
from tandem.runs.planner.calibration import Machine
from tandem.runs.planner.lengths import Micro
from tandem.runs.planner.model_shape import adapter_numbers, trained_tensors
from tandem.runs.planner.rank_share import ALONE, Rank, layer_numbers, leaf_rounds, root_numbers, sums_kept
from tandem.runs.planner.workload import Work, pass_of, width_of
from tandem.spec.algorithm import uses_reference
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.model import LoraSpec, PresetModel
from tandem.spec.optim import ApolloMiniSpec, ApolloSpec, OptimizerSpec, OwnOptimizerSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.run import RlSpec, RunSpec
from tandem.spec.train import Stage

_GIB = 2**30
_FEW_BITS = {"int8": 1.01, "nf4": 0.52}
"""Bytes a number, scales included (bitsandbytes, double quantisation)."""
_OF_VLLM_GIB = 2.0
"""What vLLM takes of its share beside weights, keys and values. A guess: activations, samplers and graphs."""
_MERGED_AT_ONCE = 3
_WHOLE = ("apollo", "muon", "adafactor")
"""Rules that update a tensor whole."""
_OFFLOAD_BUFFERS = 3 * 2 * 2**22 * 4
"""Of adamw_offload on the device (optim/adamw_offload.py)."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`parts` are GiB and need not add up to `peak_gib`: they are not all there at once."""

    name: str
    peak_gib: float
    parts: Mapping[str, float]


def needed_gib(spec: RunSpec, shape: Shape, work: Work, machine: Machine, only: str = "") -> float:
    """Return what the run takes at most, or its phase of this name does: of one GPU, as each rank has its own, or of
    the host's memory, which all ranks share."""
    ranks = all_ranks(spec)
    if machine.on_gpu and not work.dealt:
        numbered = getattr(getattr(spec, "engine", None), "numbered_gpus", ())
        ranks = ranks[: 1 + max(numbered, default=0)]  # the others have no larger micro-batch, no more rows, no engine
    of_ranks = [phases(spec, shape, work, machine, rank) for rank in ranks]
    together = max if machine.on_gpu else sum
    return max(
        together(phase.peak_gib for phase in same) for same in zip(*of_ranks, strict=True) if only in ("", same[0].name)
    )


def all_ranks(spec: RunSpec) -> list[Rank]:
    return [Rank.of(spec, number) for number in range(spec.parallel.ranks)]


def phases(spec: RunSpec, shape: Shape, work: Work, machine: Machine, rank: Rank = ALONE) -> list[Phase]:
    """Return the phases of one rank. An engine of the trainer's own process, or of its device, is the first one's; vLLM
    is where its GPUs are."""
    several = rank.count > 1
    always = _always(spec, shape, spec.train, machine, rank)
    static = sum(always.values())
    engine = _engine(spec, shape, work, machine, rank)
    process = machine.process_gib(adapters=spec.model.lora is not None, ranks=several)
    context = {"process": process}
    found = [_load(spec, shape, machine, rank)]
    if isinstance(spec, RlSpec):
        awake = engine["awake"]
        found.append(Phase("rollout", static + awake + process, {**always, "engine": awake, **context}))
    train = _train(spec, shape, spec.train, work.of_rank(rank.number), always, machine, rank)
    kept = engine["in training"]
    parts = {**train.parts, **({"engine": kept} if kept else {}), **context}
    found.append(Phase("train", train.peak_gib + kept + process, parts))
    if isinstance(spec, RlSpec):
        staged = _staged_bytes(spec, shape, machine, rank) / _GIB
        peak = static + engine["awake"] + staged + process
        found.append(Phase("sync", peak, {**always, "engine": engine["awake"], "in flight": staged, **context}))
    if not machine.on_gpu and spec.checkpoint.every and not saves_between_steps(spec):
        copy = copied_bytes(spec, shape, rank) / _GIB  # made when training has ended
        peak = static + engine["awake"] + copy + process
        found.append(Phase("save", peak, {**always, "engine": engine["awake"], "checkpoint": copy, **context}))
    if spec.model.lora is not None:  # adapters are merged into a copy (model/policy.py)
        copy = shape.total * width_of(spec.precision) / _GIB
        if several:  # tensor by tensor: as it was gathered, a copy of it, and what adapters add
            copy = _MERGED_AT_ONCE * max(map(prod, shape.large)) * width_of(spec.precision) / _GIB
        peak = static + engine["awake"] + copy + process
        found.append(Phase("export", peak, {**always, "engine": engine["awake"], "merged copy": copy, **context}))
    return found


def saves_between_steps(spec: RunSpec) -> bool:
    """Or at the end of a stage alone."""
    every, best = spec.checkpoint.every, spec.eval.every if spec.checkpoint.keep_best else 0
    return every > 0 and (every < spec.train.steps or 0 < best < spec.train.steps)


def copied_bytes(spec: RunSpec, shape: Shape, rank: Rank = ALONE) -> int:
    """What a checkpoint copies to the host and keeps room for there (train/trainer.py). Of several ranks each copies
    its rows, and the first one what all hold."""
    if spec.model.lora is not None and not rank.leads:
        return 0
    state, _ = _state(spec.train.optimizer, shape, spec.model.lora, rank)
    master = _master(spec.precision, rank.held(shape)) if spec.model.lora is None else 0
    return _trained_bytes(spec, shape, rank) + state + master


def checkpoint_bytes(spec: RunSpec, shape: Shape) -> int:
    """On the disk: that, and a deployable copy of what is trained."""
    frozen = shape.tower * width_of(spec.precision) if spec.model.lora is None else 0
    return copied_bytes(spec, shape) + _trained_bytes(spec, shape) + frozen


def _trained_bytes(spec: RunSpec, shape: Shape, rank: Rank = ALONE) -> int:
    lora = spec.model.lora
    return adapter_numbers(shape, lora) * 4 if lora else rank.held(shape) * width_of(spec.precision)


def _staged_bytes(spec: RlSpec, shape: Shape, machine: Machine, rank: Rank) -> int:
    """Of a version on its way. Each rank has buckets for its own rows; the first one sends adapters alone, and has the
    base on its host once, whose digests the engine's must equal."""
    staged = spec.sync.staged_bytes(sync_bytes(spec, shape))
    if rank.count == 1:
        return staged
    if spec.sync.traits.carries != "adapter":
        return min(staged, rank.held(shape) * width_of(spec.precision))  # a bucket is as large as what goes into it
    base = 0 if machine.on_gpu else shape.total * width_of(spec.precision)
    return (staged + base) * rank.leads


def sync_bytes(spec: RlSpec, shape: Shape) -> int:
    """What a version moves."""
    if spec.sync.traits.single_copy:
        return 0
    if spec.sync.traits.carries == "adapter":
        return adapter_numbers(shape, spec.model.lora) * width_of(spec.precision)
    return shape.held * width_of(spec.precision)


def _load(spec: RunSpec, shape: Shape, machine: Machine, rank: Rank) -> Phase:
    """Weights come in 32 bits by way of the host, and are narrowed one after the other. Of a directory, a rank reads
    its own rows; what is made from scratch, or begins with other weights, is whole on every rank first."""
    process = machine.process_gib(adapters=spec.model.lora is not None, ranks=rank.count > 1)
    weights = _weights(spec.model.lora, shape, width_of(spec.precision), rank)
    low = _master(spec.precision, rank.held(shape)) if spec.model.lora is None else 0
    largest = max(prod(rank.rows(dims)) for dims in shape.large) * 4
    whole = rank.count == 1 or isinstance(spec.model, PresetModel) or spec.model.warm_start is not None
    there = (weights + low) / _GIB if machine.on_gpu else max(weights + low, 4 * shape.held * whole) / _GIB
    parts = {"weights": weights / _GIB, "one tensor in 32 bits": largest / _GIB, "process": process}
    return Phase("load", there + largest / _GIB * machine.on_gpu + process, parts)


def _weights(lora: LoraSpec | None, shape: Shape, width: int, rank: Rank) -> int:
    if lora is None:
        return (rank.held(shape) + shape.tower) * width
    if rank.count > 1:  # and adapters whole
        return rank.held(shape) * width + adapter_numbers(shape, lora) * 4
    few = _FEW_BITS.get(lora.base, float(width))
    frozen = shape.linear_numbers * few + (shape.held - shape.linear_numbers) * width
    return int(frozen) + adapter_numbers(shape, lora) * 4


def _master(precision: PrecisionSpec, trained: int) -> int:
    if not isinstance(precision, Bfloat16Precision):
        return 0
    return trained * {"split": 2, "fp32": 4}.get(precision.master, 0)


def _updated(shape: Shape, lora: LoraSpec | None, rank: Rank) -> list[tuple[Dims, bool]]:
    """Of every tensor that a rank updates its dimensions, and whether it is a matrix. Adapters are whole on all."""
    tensors = trained_tensors(shape, lora)
    return [*tensors] if lora else [(rank.rows(dims), matrix) for dims, matrix in tensors]


def _state(optimizer: OptimizerSpec, shape: Shape, lora: LoraSpec | None, rank: Rank) -> tuple[int, list[int]]:
    """Bytes of the state, and the sizes of what is updated whole."""
    kind = "apollo" if optimizer.kind == "apollo_mini" else optimizer.kind
    projected = optimizer.rank if isinstance(optimizer, ApolloSpec) else 1
    tables = optimizer.tables if isinstance(optimizer, ApolloMiniSpec) else "adamw"
    others = tables if kind == "apollo" else "adamw" if kind == "muon" else kind
    total, whole = 0, dict[str, Dims]()
    for number, ((dims, matrix), (full, _)) in enumerate(
        zip(_updated(shape, lora, rank), trained_tensors(shape, lora), strict=True)
    ):
        rule = kind if matrix else others
        if isinstance(optimizer, OwnOptimizerSpec):
            total += int(optimizer.state_bytes * prod(dims))
        else:
            total += byte_sizes.state_bytes(rule, dims, projected)
        if rule in _WHOLE or (isinstance(optimizer, OwnOptimizerSpec) and not own_code.says(optimizer.name, "by_rows")):
            whole[f"{number}"] = tuple(full)
    if lora is None and rank.row_shards > 1:  # each by its owner, in rounds
        rounds = owner_rounds.rounds_of_owners(whole, rank.row_shards)
        return total, [owner_rounds.most_numbers(whole, rounds, rank.number % rank.row_shards)]
    return total, [prod(dims) for dims in whole.values()]


def _always(spec: RunSpec, shape: Shape, stage: Stage, machine: Machine, rank: Rank = ALONE) -> dict[str, float]:
    lora, width = spec.model.lora, width_of(spec.precision)
    state, _ = _state(stage.optimizer, shape, lora, rank)
    if stage.optimizer.kind == "adamw_offload" and machine.on_gpu:
        state = _OFFLOAD_BUFFERS
    shared = isinstance(spec, RlSpec) and spec.sync.traits.shares_memory and machine.on_gpu
    found = {
        "weights": 0.0 if shared else _weights(lora, shape, width, rank) / _GIB,
        "master": (_master(spec.precision, rank.held(shape)) if lora is None else 0) / _GIB,
        "optimizer": state / _GIB,
    }
    if shape.tower:
        found["images"] = byte_sizes.IMAGE_CACHE_BYTES / _GIB
    if not machine.on_gpu and saves_between_steps(spec):
        found["checkpoint"] = copied_bytes(spec, shape, rank) / _GIB
    compares = spec.algorithm is not None and uses_reference(spec.algorithm)
    if shape.teacher:
        found["teacher"] = shape.teacher * width / _GIB
    elif compares and lora is None:
        found["reference"] = rank.held(shape) * width / _GIB
    return found


def _train(
    spec: RunSpec, shape: Shape, stage: Stage, work: Work, always: Mapping[str, float], machine: Machine,
    rank: Rank,
) -> Phase:  # fmt: skip
    """The more of two: a micro-batch that begins a step, and one that finds gradients there."""
    first = _micro(spec, shape, stage, work, work.micro, always, machine, rank, summed=False)
    if work.later is None:
        return first
    later = _micro(spec, shape, stage, work, work.later, always, machine, rank, summed=True)
    return max(first, later, key=lambda phase: phase.peak_gib)


def _micro(
    spec: RunSpec, shape: Shape, stage: Stage, work: Work, micro: Micro, always: Mapping[str, float],
    machine: Machine, rank: Rank, *, summed: bool,
) -> Phase:  # fmt: skip
    lora, width = spec.model.lora, width_of(spec.precision)
    how = pass_of(spec, shape, micro, on_gpu=machine.on_gpu)
    whole = [prod(dims) for dims, _ in trained_tensors(shape, lora)]
    tensors = [prod(dims) for dims, _ in _updated(shape, lora, rank)]
    tree = spec.parallel.num_shares > 1
    grad_width = 4 if lora or width == 4 or work.num_micro > 1 or tree else width
    gradients = grad_width * (max(tensors) if stage.gradient_release else sum(tensors))
    adds = lora is None and rank.adds(shape, machine.gpu_bytes)
    kept = sums_kept(leaf_rounds(spec.parallel)) if adds else work.sums
    if rank.sums == "running" or (lora is None and rank.sums_as(shape, machine.gpu_bytes) == "running"):
        kept = 0  # the sum of earlier micro-batches is that of this one, too
    sums = summed * gradients * kept
    layer, reduced, sent = backward_bytes(shape, how, micro.tokens), 0, width
    if adds:
        sums, sent = sums + summed * 4 * shape.total, 4  # its own, whole
    elif tree and width < 4 and lora is None:
        reduced = width * sum(tensors)  # as backward left them, until all are in fp32
    if rank.count > 1 and lora is None:
        layer += width * max(whole) + 2 * sent * layer_numbers(shape)  # gradients that are sent, and that come
        reduced += 2 * sent * root_numbers(shape)
    elif rank.count > 1:  # every rank has those of all others of its host for a while, and copies their sum
        reduced = rank.row_shards * gradients
    head = byte_sizes.head_bytes(
        micro.credited, shape.vocab, shape.hidden, width, on_gpu=machine.on_gpu, trained=lora is None
    )
    _, undivided = _state(stage.optimizer, shape, lora, rank)
    update = byte_sizes.update_bytes(tensors, undivided, narrow=width == 2 and lora is None)
    parts = byte_sizes.MemoryParts(
        always=sum(always.values()),
        activations=activation_bytes(shape, how, micro.tokens) / _GIB,
        gradients=gradients / _GIB,
        num_micro=2 if summed else 1,
        head_forward=head[0] / _GIB,
        head_backward=head[1] / _GIB,
        largest=max(whole) * (4 if lora else width) / _GIB,
        update=0.0 if at_once(spec, stage, machine) else update / _GIB,
        layer=layer / _GIB,
        sums=sums / _GIB,
        gathered=rank.gathered(shape, width, machine.gpu_bytes) * width / _GIB,
        reduced=reduced / _GIB,
        holes=0.0 if machine.on_gpu else _holes(shape, lora, rank, width) / _GIB,
    )
    shown = {
        **always, "activations": parts.activations, "gradients": parts.gradients, "logits": max(head) / _GIB,
        "update": parts.update,
    }  # fmt: skip
    of_ranks = {
        "earlier gradients": parts.sums, "gathered": parts.gathered, "in reduction": parts.reduced,
        "holes": parts.holes,
    }  # fmt: skip
    shown |= {name: gib for name, gib in of_ranks.items() if gib}
    if machine.on_gpu:
        return Phase("train", byte_sizes.peak(parts), shown)
    if _GIB * sum(always[name] for name in ("weights", "master", "optimizer")) < byte_sizes.GIVEN_BACK_BYTES:
        freed = byte_sizes.heaped(parts, scattered=lora is not None) - byte_sizes.peak(parts)
    else:
        freed = machine.kept_gib
    return Phase("train", byte_sizes.peak(parts) + freed, {**shown, "freed": freed})


def _holes(shape: Shape, lora: LoraSpec | None, rank: Rank, width: int) -> int:
    """Return the bytes of freed memory that a host keeps in backward of several ranks: between the buffers in which a
    layer's gradients are summed lie the sums, which stay, so the next layer's find no place there."""
    buffer = width * layer_numbers(shape)
    if rank.count == 1 or lora is not None or buffer >= byte_sizes.MAPPED_ALONE_BYTES:
        return 0
    return 2 * buffer * shape.layers


def at_once(spec: RunSpec, stage: Stage, machine: Machine) -> bool:
    """One launch updates all of it (optim/adamw_triton.py)."""
    precision = spec.precision
    halves = not isinstance(precision, Bfloat16Precision) or precision.master == "split" or spec.model.lora is not None
    return machine.on_gpu and stage.optimizer.kind in ("adamw", "adamw_8bit") and halves


def _engine(spec: RunSpec, shape: Shape, work: Work, machine: Machine, rank: Rank) -> dict[str, float]:
    """GiB of this rank's card that engines have, awake and while the trainer steps."""
    if isinstance(spec, RlSpec) and isinstance(spec.engine, VllmEngineSpec):
        count = machine.on_gpu * engines_beside(spec.engine, rank)
        asleep = count * machine.asleep_gib
        awake = count * spec.engine.memory_share * machine.memory_gib + asleep
        return {"awake": awake, "in training": asleep if sleeps(spec, spec.engine) else awake}
    if not isinstance(spec, RlSpec) or not rank.leads:
        return {"awake": 0.0, "in training": 0.0}
    engine, width = spec.engine, width_of(spec.precision)
    if isinstance(engine, HfEngineSpec):  # it keeps its cache
        cache = cache_gib(shape, work, width, engine.kv_gib, touched=not machine.on_gpu)
        return {"awake": cache, "in training": cache}
    if isinstance(engine, ServerEngineSpec) and not engine.url:
        copies = shape.total * width / _GIB * (not spec.sync.traits.shares_memory)
        of_one = replace(work, rows=ceil(work.rows / engine.replicas))
        cache = cache_gib(shape, of_one, width, engine.kv_gib, touched=not machine.on_gpu)
        held = engine.replicas * (copies + cache + machine.context_gib)
        return {"awake": held, "in training": held}
    return {"awake": 0.0, "in training": 0.0}


def rows_held(spec: RlSpec, shape: Shape, work: Work, machine: Machine) -> int:
    """Sequences whose keys and values the engines' memory holds at once. Of one that was started elsewhere, all."""
    engine = spec.engine
    if isinstance(engine, VllmEngineSpec) and machine.on_gpu and not engine.url:
        share = engine.tensor_parallel * (engine.memory_share * machine.memory_gib - _OF_VLLM_GIB) * _GIB
        room = share - shape.held * width_of(spec.precision)
    elif isinstance(engine, HfEngineSpec):
        room = engine.kv_gib * _GIB / engine.replicas
    elif isinstance(engine, ServerEngineSpec) and not engine.url:
        room = engine.kv_gib * _GIB
    else:
        return work.rows
    return min(work.rows, engine.replicas * max(1, int(room / row_bytes(spec, shape, work))))


def share_for(spec: RlSpec, engine: VllmEngineSpec, shape: Shape, work: Work, machine: Machine) -> float:
    """`engine.memory_share` that holds the keys and values of all sequences, in whole hundredths."""
    held = shape.held * width_of(spec.precision) + work.rows / engine.replicas * row_bytes(spec, shape, work)
    return ceil(100 * (held / _GIB / engine.tensor_parallel + _OF_VLLM_GIB) / machine.memory_gib) / 100


def row_bytes(spec: RlSpec, shape: Shape, work: Work) -> int:
    """Keys, values and states of the longest sequence."""
    width = width_of(spec.precision)
    return work.row_tokens * shape.position_bytes(width) + shape.state_bytes(width)


def engines_beside(engine: VllmEngineSpec, rank: Rank) -> int:
    """Return how many engines are on the rank's GPU. All are on the first host."""
    return engine.engines_on(rank.number) if rank.number < rank.row_shards else 0


def sleeps(spec: RlSpec, engine: VllmEngineSpec) -> bool:
    if spec.sync.traits.shares_memory:
        return False
    return engine.sleep == "free" or (engine.sleep == "auto" and spec.train.max_lag == 0)


def cache_gib(shape: Shape, work: Work, width: int, most_gib: float, *, touched: bool) -> float:
    """Of the embedded engine, which grows to what is asked. `touched`: what is written of it alone, as on a CPU."""
    one, states_gib = max(1, shape.position_bytes(width)), work.rows * shape.state_bytes(width) / _GIB
    rows, length = work.rows, work.row_tokens + 1
    most_gib = max(0.0, most_gib - states_gib)
    if not touched:
        rows, length = byte_sizes.cache_held(rows, length, int(most_gib * _GIB / one))
    return states_gib + min(rows * length * one / _GIB, max(most_gib, length * one / _GIB))


def largest_micro_tokens(spec: RunSpec, shape: Shape, work: Work, machine: Machine) -> int:
    """The most tokens of one forward and backward that fit; 0 if none do."""

    def fits(tokens: int) -> bool:
        return needed_gib(spec, shape, work.sized(tokens), machine, "train") <= machine.limit_gib

    low, high = 0, 2**20
    while high - low > 16:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low // 16 * 16


def largest_cache_gib(spec: RunSpec, shape: Shape, machine: Machine) -> float:
    """For keys and values beside all that is there between training steps."""
    width = width_of(spec.precision)
    rest = machine.limit_gib
    for rank in [Rank.of(spec, 0)] if machine.on_gpu else all_ranks(spec):
        rest -= machine.context_gib + sum(_always(spec, shape, spec.train, machine, rank).values())
    own = isinstance(spec, RlSpec) and not isinstance(spec.engine, HfEngineSpec)
    return max(0.0, rest - (shape.held * width / _GIB + machine.context_gib if own else 0.0))
