"""The gates that a job's weights must pass before they are served. Numbers in, a verdict out; no verdict holds a NaN.

A number that is missing or not finite does not pass: without a measurement a gate stays closed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class GateOutcome:
    gate: str
    passed: bool
    value: float | None
    """None: not finite."""
    limit: float | None
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])

    def row(self) -> dict[str, Any]:
        return asdict(self)


class ChangeSize(Protocol):
    """How far the weights moved (online/weight_deltas.py)."""

    @property
    def norm(self) -> float: ...
    @property
    def relative(self) -> float: ...
    @property
    def changed(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def not_finite(self) -> Sequence[str]: ...


def finite(change: ChangeSize, losses: Sequence[float]) -> GateOutcome:
    """Pass if all weights and all of these losses are finite."""
    bad_losses = sum(not math.isfinite(loss) for loss in losses)
    bad_tensors = len(change.not_finite)
    example = f" (for example '{change.not_finite[0]}')" if bad_tensors else ""
    text = f"{bad_losses} of {len(losses)} losses and {bad_tensors} tensors{example} are not finite"
    if not bad_losses + bad_tensors:
        text = f"all {len(losses)} losses and all weights are finite"
    return GateOutcome("finite", not bad_losses + bad_tensors, float(bad_losses + bad_tensors), 0.0, text)


def update_norm(change: ChangeSize, *, max_relative: float) -> GateOutcome:
    text = f"{change.changed} of {change.total} weights changed, by {change.relative:.2e} of their norm"
    numbers = {"norm": change.norm, "changed": float(change.changed), "total": float(change.total)}
    return _at_most("update_norm", change.relative, max_relative, text, numbers)


def held_out(before: Sequence[float], after: Sequence[float], *, max_rise: float) -> GateOutcome:
    """`before`, `after`: losses of the same conversations, in the same order."""
    if not before and not after:
        return GateOutcome("held_out", True, None, max_rise, "nothing is held out")
    rises = [now - then for then, now in zip(before, after, strict=True)]
    rise = _mean(rises)
    numbers = {"before": _mean(before), "after": _mean(after), "samples": float(len(rises))}
    numbers |= {"worst": max(rises), "stderr": _stderr(rises)}
    text = (
        f"the loss of {len(rises)} held-out conversations went from {numbers['before']:.4f} to {numbers['after']:.4f} "
        f"nats a token, {rise:+.4f}"
    )
    return _at_most("held_out", rise, max_rise, text, numbers)


def kl(drawn: Sequence[tuple[Sequence[float], Sequence[float]]], *, limit: float) -> GateOutcome:
    """Estimate KL(reference || candidate) per token from tokens that the reference sampled. `drawn`: the reference's
    logprobs of them, and the candidate's. The estimator is r - 1 - log r with r = p_candidate / p_reference: unbiased,
    and never below 0."""
    gaps = [
        after - before for reference, candidate in drawn for before, after in zip(reference, candidate, strict=True)
    ]
    if not gaps:
        return GateOutcome("kl", True, None, limit, "no ordinary prompt was sampled")
    estimates = [math.expm1(min(gap, _MAX_LOG_RATIO)) - gap for gap in gaps]
    value = _mean(estimates)
    text = f"answers to ordinary prompts moved by {value:.4f} nats a token ({len(drawn)} answers, {len(gaps)} tokens)"
    numbers = {"tokens": float(len(gaps)), "answers": float(len(drawn)), "stderr": _stderr(estimates)}
    return _at_most("kl", value, limit, text, {**numbers, "plain": -_mean(gaps)})


_MAX_LOG_RATIO = 20.0  # e^20 fails any limit, and does not overflow


def canary(
    name: str,
    *,
    expected_ids: Sequence[int],
    answer_ids: Sequence[int] | None,
    before: Sequence[float],
    after: Sequence[float],
    max_drop: float,
) -> GateOutcome:
    """`answer_ids`: the greedy answer if it must equal the expected one; else None. `before`, `after`: logprobs of the
    expected answer's tokens."""
    drop = _sum(before) - _sum(after)
    gate, numbers = f"canary:{name}", {"tokens": float(len(expected_ids))}
    text = f"the answer that '{name}' expects became less likely by {drop:.3f} nats"
    if answer_ids is not None:
        same = list(answer_ids) == list(expected_ids)
        at = next((i for i, pair in enumerate(zip(answer_ids, expected_ids, strict=False)) if pair[0] != pair[1]), None)
        where = "has another length" if at is None else f"differs from token {at} on"
        if not same:
            return GateOutcome(
                gate, False, _finite_or_none(drop), max_drop, f"the answer to '{name}' {where}; {text}", numbers
            )
        text = f"the answer to '{name}' is as expected; {text}"
    return _at_most(gate, drop, max_drop, text, numbers)


def verdict(all_: Sequence[GateOutcome]) -> tuple[bool, str]:
    """Return whether to publish, and a sentence that says why."""
    failed = [each for each in all_ if not each.passed]
    if failed:
        return False, "rejected by " + "; ".join(f"{each.gate}: {each.text}" for each in failed)
    return True, f"passed {', '.join(each.gate for each in all_)}"


def _at_most(gate: str, value: float, limit: float, text: str, numbers: Mapping[str, float]) -> GateOutcome:
    passed = math.isfinite(value) and value <= limit
    relation = "within" if passed else "and not within"
    finite_numbers = {name: number for name, number in numbers.items() if math.isfinite(number)}
    full_text = f"{text}, {relation} the limit of {limit:g}"
    return GateOutcome(gate, passed, _finite_or_none(value), limit, full_text, finite_numbers)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _mean(values: Sequence[float]) -> float:
    return _sum(values) / len(values)


def _stderr(values: Sequence[float]) -> float:
    if not math.isfinite(_sum(values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
