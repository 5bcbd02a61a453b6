"""Seconds by phase, from operations and from what was measured of a kind of GPU (runs/calibration.toml)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.ops import sizes
from tandem.ops.sizes import Shape
from tandem.runs.calibration import Machine
from tandem.runs.plan_memory import sync_bytes, width_of
from tandem.runs.plan_work import PROMPT_TOKENS, Work
from tandem.spec.run import RlSpec, RunSpec

_PASSES = {"keep": 6, "offload": 6, "selective": 6.5, "recompute": 8}
"""Operations a parameter and token, forward and backward; adapters need no gradient of their base."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step of `[train]`."""

    rollout_s: float
    train_s: float
    sync_s: float
    steps_s: float
    """Of all steps, warm-up included. Loading and evaluations are not in it."""
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s


def times(spec: RunSpec, shape: Shape, work: Work, machine: Machine) -> Times:
    train = _train_s(spec, shape, work.step_tokens, machine)
    rollout = sync = warmup = 0.0
    if isinstance(spec, RlSpec):
        rollout, sync = _rollout_s(spec, shape, work, machine), _sync_s(spec, shape, machine)
        if spec.warmup is not None:
            tokens = spec.warmup.batch_size * (PROMPT_TOKENS + machine.answer_share * spec.train.max_tokens)
            warmup = spec.warmup.steps * _train_s(spec, shape, tokens, machine)
    step = rollout + train + sync
    return Times(rollout, train, sync, warmup + spec.train.steps * step, work.step_tokens / step)


def _train_s(spec: RunSpec, shape: Shape, tokens: float, machine: Machine) -> float:
    lora = spec.model.lora is not None
    operations = _PASSES[spec.model.activations] - (2 if lora else 0)
    if spec.recipe == "preference":
        operations += 2  # the reference
    attention = 2 * operations * shape.layers * shape.query  # beside the weights, for each token seen: half a row
    a_token = operations * shape.total + attention * PROMPT_TOKENS
    return a_token * tokens / (machine.train_flops_lora if lora else machine.train_flops)


def _rollout_s(spec: RlSpec, shape: Shape, work: Work, machine: Machine) -> float:
    """A row takes a token a step, and a step reads all weights and the keys and values of every row."""
    width = width_of(spec.precision)
    rows = min(work.sequences, getattr(spec.engine, "max_running", 256))
    waves = math.ceil(work.sequences / rows)
    replicas = getattr(spec.engine, "replicas", 1)
    seen = work.row_tokens * sizes.position_bytes(shape.layers, shape.kv_heads, shape.head_dim, width) * rows / 2
    read_s = (shape.total * width + seen) / (machine.bandwidth_gb_s * 1e9)
    computed_s = 2 * shape.total * rows / machine.prefill_flops
    launch = machine.decode_step_s if spec.model.lora is None else machine.decode_step_lora_s
    prompts = work.sequences / spec.train.group_size * (work.row_tokens - work.answer_tokens)
    prefill_s = 2 * shape.total * prompts / machine.prefill_flops
    decode_s = waves * work.answer_tokens * (launch + max(read_s, computed_s))
    return (prefill_s + decode_s) / replicas


def _sync_s(spec: RlSpec, shape: Shape, machine: Machine) -> float:
    fixed, gb_s = machine.sync[spec.sync.bridge]
    moved = sync_bytes(spec, shape) / 1e9
    return (fixed + (moved / gb_s if gb_s else 0.0)) / spec.sync.every
