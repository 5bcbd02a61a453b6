"""Seconds by phase, from operations and from what was measured of a kind of GPU (runs/planner/calibration.toml)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import prod

from tandem.ops.activation_sizes import layers_bytes
from tandem.ops.counted_shape import CountedShape, Shape
from tandem.runs.planner.calibration import Machine
from tandem.runs.planner.memory import all_ranks, at_once, engines_beside, row_bytes, rows_held, sync_bytes
from tandem.runs.planner.model_shape import adapter_numbers
from tandem.runs.planner.rank_share import Rank, leaf_rounds, root_numbers
from tandem.runs.planner.workload import PROMPT_TOKENS, Work, compiles, packs, pass_of, width_of
from tandem.spec.algorithm import uses_reference
from tandem.spec.engine import HfEngineSpec, VllmEngineSpec
from tandem.spec.run import RlSpec, RunSpec
from tandem.spec.train import Stage

_AGAIN = {"recompute": 1, "selective": 0}
"""Forward passes that backward does once more, products included."""
_MASKED_ATTENTION, _CAUSAL_ATTENTION, _PACKED_ATTENTION = 1.0, 0.25, 0.16
"""Under a mask every pair is computed; without one half of them, by kernels that are twice as fast, and those that are
told the spans three times."""
_LORA_LAUNCHES = 1.35
_ON_ONE_HOST = 8
"""Ranks whose link is the one that was measured."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step of `[train]`."""

    rollout_s: float
    train_s: float
    """Of the rank that has most to compute, with what goes between ranks."""
    sync_s: float | None
    """None: not calibrated for this bridge."""
    ranks_s: float | None
    """Of `train_s`, what it takes to gather weights and sum gradients. None: not calibrated."""
    step_s: float
    """Less than the sum where rollouts go on meanwhile. Without what is not calibrated."""
    steps_s: float
    """Of all steps, warm-up included. Loading and evaluations are not in it."""
    tokens_per_s: float
    not_calibrated: tuple[str, ...] = ()
    """What the seconds leave out."""


def times(spec: RunSpec, shape: Shape, work: Work, machine: Machine) -> Times:
    between = _ranks_s(spec, shape, work, machine)
    train = _train_s(spec, spec.train, shape, _of_a_rank(work), machine) + (between or 0.0)
    rollout = warmup = 0.0
    sync: float | None = 0.0
    if isinstance(spec, RlSpec):
        rollout, sync = _rollout_s(spec, shape, work, machine), _sync_s(spec, shape, machine)
        if spec.warmup is not None:
            credited = spec.warmup.batch_size * machine.answer_share * spec.train.max_tokens
            tokens = credited + spec.warmup.batch_size * PROMPT_TOKENS
            masked, ranks = float(not packs(spec, on_gpu=machine.on_gpu)), spec.parallel.ranks
            shown = replace(work, step_tokens=tokens / ranks, credited_tokens=credited / ranks, masked=masked)
            warmup = spec.warmup.steps * _train_s(spec, spec.warmup, shape, shown, machine)
    step = _step_s(spec, rollout, train, sync or 0.0)
    unknown = [f"sync over '{spec.sync.bridge}'"] if sync is None and isinstance(spec, RlSpec) else []
    unknown += ["what goes between ranks"] if between is None else []
    return Times(
        rollout, train, sync, between, step, warmup + spec.train.steps * step, work.step_tokens / step, tuple(unknown)
    )


def _step_s(spec: RunSpec, rollout: float, train: float, sync: float) -> float:
    """With a lag, an engine in a process of its own samples while the trainer steps and sends; on the trainer's GPU it
    waits for that as long as the trainer computes (docs/PERFORMANCE.md, "A lag on one GPU")."""
    if not isinstance(spec, RlSpec) or spec.train.max_lag == 0 or isinstance(spec.engine, HfEngineSpec):
        return rollout + train + sync
    engine = spec.engine
    shares_gpu = isinstance(engine, VllmEngineSpec) and any(engines_beside(engine, rank) for rank in all_ranks(spec))
    return max(rollout + train * shares_gpu, train + sync)


def _train_s(spec: RunSpec, stage: Stage, shape: Shape, work: Work, machine: Machine) -> float:
    """Products, attention, what passes through memory, launches, and the update."""
    lora, kept = spec.model.lora, spec.model.activations
    passes = (2 if lora else 3) + _AGAIN.get(kept, 0)
    linears, heads = _multiplied(spec, shape)
    products = 2 * linears * work.step_tokens * passes
    products += 2 * shape.vocab * shape.hidden * work.credited_tokens * (3 if lora else 4)
    if spec.recipe == "preference":
        # The reference; in KTO both models also score as many mismatched answers.
        forwards = {"kto": 3}.get(spec.algorithm.kind, int(uses_reference(spec.algorithm)))
        products += 2 * _active(spec, shape) * work.step_tokens * forwards
    products += 2 * shape.teacher * work.step_tokens
    pairs = 4 * heads * work.step_tokens * work.attended
    packed, compiled = (ask(spec, on_gpu=machine.on_gpu) for ask in (packs, compiles))
    alone = _PACKED_ATTENTION if packed else _CAUSAL_ATTENTION
    pairs *= (3.5 + _AGAIN.get(kept, 0)) * (work.masked * _MASKED_ATTENTION + (1 - work.masked) * alone)
    row = round(work.attended) if work.masked else 0
    how = replace(pass_of(spec, shape, work.micro, on_gpu=machine.on_gpu), activations="keep", row=row)
    layer_s, passed_gb_s = machine.layer_s, machine.passed_gb_s
    if compiled:
        layer_s, passed_gb_s = machine.compiled_layer_s, machine.compiled_passed_gb_s
    updated_per_s = machine.updated_at_once_per_s if at_once(spec, stage, machine) else machine.updated_per_s
    passed = layers_bytes(shape, how, work.step_tokens)
    micro = max(1, math.ceil(work.step_tokens / max(1, min(work.micro.tokens, stage.micro_tokens))))
    launches = micro * shape.layers * (_LORA_LAUNCHES if lora else 1) * (1 + _AGAIN.get(kept, 0) / 3)
    updated = adapter_numbers(shape, lora) if lora else Rank.of(spec, 0).held(shape)
    return (
        products / machine.train_flops
        + pairs / machine.attention_flops
        + passed / (passed_gb_s * 1e9)
        + launches * layer_s
        + updated / updated_per_s
        + work.sequences * machine.sequence_s * isinstance(spec, RlSpec)
    )


def _multiplied(spec: RunSpec, shape: Shape) -> tuple[float, float]:
    """Return the numbers of all linear layers that a token is multiplied with, and of all heads."""
    if isinstance(shape, CountedShape):
        count = shape.count(width_of(spec.precision), None)
        return count.products, count.heads
    return shape.linear_numbers, shape.query * shape.layers


def _active(spec: RunSpec, shape: Shape) -> float:
    """Return the number of parameters that compute a token: of experts, those that it is sent to."""
    if isinstance(shape, CountedShape):
        return _multiplied(spec, shape)[0] + shape.vocab * shape.hidden
    return shape.total


def _rollout_s(spec: RlSpec, shape: Shape, work: Work, machine: Machine) -> float:
    """A row takes a token a step, and a step reads all weights and the keys and values of every row. There are as many
    steps as the longest answer has tokens, however few rows are left by then."""
    replicas = getattr(spec.engine, "replicas", 1)
    rows = min(work.sequences, rows_held(spec, shape, work, machine)) / replicas
    waves = work.sequences / replicas / rows  # a sequence that waits begins as another one ends
    if isinstance(spec.engine, HfEngineSpec):  # vLLM's figures were fitted to steps with all rows
        rows *= min(1.0, work.credited_tokens / (work.sequences * work.answer_tokens))  # that are left on average
    seen = row_bytes(spec, shape, work) * rows / 2
    read_s = (shape.total * width_of(spec.precision) + seen) / (machine.bandwidth_gb_s * 1e9)
    computed_s = 2 * _active(spec, shape) * rows / machine.prefill_flops
    launch = machine.decode_step_s if spec.model.lora is None else machine.decode_step_lora_s
    launch += rows * machine.decode_row_s
    prompts = work.sequences / spec.train.group_size * (work.row_tokens - work.answer_tokens)
    prefill_s = 2 * _active(spec, shape) * prompts / machine.prefill_flops
    decode_s = waves * work.answer_tokens * max(launch, read_s, computed_s)
    if isinstance(spec.engine, HfEngineSpec):  # one process plays, samples and trains
        return prefill_s + decode_s + work.sequences * machine.embedded_episode_s
    return max(prefill_s / replicas + decode_s, work.sequences * machine.episode_s)


def _of_a_rank(work: Work) -> Work:
    """Return what the rank computes that has most of a step."""
    credited = work.credited_tokens * work.rank_tokens / work.step_tokens
    return replace(work, step_tokens=work.rank_tokens, credited_tokens=credited)


def _ranks_s(spec: RunSpec, shape: Shape, work: Work, machine: Machine) -> float | None:
    """Of each round: weights are gathered for forward and, the layers', again for backward, unless they are kept for
    the step; gradients are sent to the ranks that hold their rows, and those of adapters to all. Nothing is taken
    off for what goes on meanwhile."""
    ranks, width, lora = spec.parallel.ranks, width_of(spec.precision), spec.model.lora
    if ranks == 1:
        return 0.0
    if not machine.link_gb_s or ranks > min(_ON_ONE_HOST, spec.parallel.row_shards):
        return None
    layers = sum(map(prod, (dims for layer in shape.each_layer for dims in layer)))
    gathered = work.rounds * width * (2 * layers + root_numbers(shape))
    rank = Rank.of(spec, 0)
    if rank.keeps(shape, width, machine.gpu_bytes):
        gathered = 0 if lora else width * shape.total  # a frozen base is gathered once a run
    if lora is not None:
        reduced = work.rounds * 4 * adapter_numbers(shape, lora)
    elif rank.adds(shape, machine.gpu_bytes):
        reduced = leaf_rounds(spec.parallel) * 4 * shape.total / ranks
    else:
        reduced = work.rounds * width * shape.total / ranks
    sent = (gathered / ranks + reduced) * (ranks - 1)
    return sent / (machine.link_gb_s * 1e9)


def _sync_s(spec: RlSpec, shape: Shape, machine: Machine) -> float | None:
    if spec.sync.bridge not in machine.sync:
        return None
    fixed, gb_s = machine.sync[spec.sync.bridge]
    moved = sync_bytes(spec, shape) / 1e9
    return (fixed + (moved / gb_s if gb_s else 0.0)) / spec.sync.every
