"""Compare an engine's logprobs of sampled tokens with the trainer's own, and refuse a batch whose gap is too large.

Tokens of the current version differ by rounding only. A healthy gap depends on the weights' type and the model's depth,
so the limit is calibrated on the run's own first batch, under a ceiling that no healthy model reaches. A token that is
`lag` versions old also differs by what the policy moved since then, so its limit is that of current tokens plus an
allowance for each version. The allowance follows what earlier batches differed by, between two bounds. It is at most
twice what the updates between moved, as the trainer measures it (train/move_meter.py; not with several ranks or with
gradient release). So weights that are wrong by more than an update are seen, however slowly a run learns.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.errors import LogprobGap
from tandem.types import UNKNOWN_VERSION, Metrics, MicroBatch, TokenLogprobs

_log = logging.getLogger(__name__)

_TIMES = 3.0  # the limit is this multiple of the first batch's gap
_LAYERS = 24  # rounding adds up like a random walk over layers; below this depth the limits stay the same
_LEAST, _MOST = 0.2, 1.0  # allowance in nats for a version of lag; a small model's first steps move it by 0.2
_MOVES_KEPT = 16
_MEASURED_TIMES, _MEASURED_KEPT = 2.0, 64  # the allowance is this multiple of what the updates moved; one for each lag

GapRow = list[float]
"""Of one lag: the sum, the largest and the number of absolute differences."""


@dataclass(frozen=True, slots=True)
class CalibratedLimit:
    """A limit that the first batch sets: a multiple of its gap, at least `floor`; it is refused above `ceiling`."""

    floor: float
    ceiling: float
    why: str = ""
    """What the two come from."""


def limits_for(*, exact: bool, layers: int) -> CalibratedLimit:
    """Return the bounds of the limit for a type and a depth. `exact`: both ends compute in 32 bits."""
    if exact:
        return CalibratedLimit(0.005, 0.02, "float32")
    deeper = math.sqrt(max(1.0, layers / _LAYERS))
    return CalibratedLimit(0.05 * deeper, 0.12 * deeper, f"16 bits, {layers} layers")


class Gap:
    """The differences on a batch's tokens, by lag: how many versions ago each was sampled."""

    def __init__(self, by_lag: Mapping[int, GapRow] | None = None, unknown: int = 0) -> None:
        self._by_lag = {lag: list(row) for lag, row in (by_lag or {}).items()}
        self._unknown = unknown
        self._unread: list[tuple[Tensor, Tensor, int]] = []
        """Of micro-batches whose numbers are still on the device: differences, versions, the trainer's version."""

    @property
    def by_lag(self) -> Mapping[int, GapRow]:
        self._read()
        return self._by_lag

    @property
    def unknown(self) -> int:
        """Sampled tokens whose version is not known: nothing says what they should be compared with."""
        self._read()
        return self._unknown

    def add(self, scored: TokenLogprobs, micro: MicroBatch, version: int) -> None:
        self._unread.append(((scored.logprobs_N.detach() - micro.behaviour_N).abs(), micro.versions_N, version))

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if not unread:
            return
        gaps, versions, at = zip(*unread, strict=True)
        lengths = [len(gap_N) for gap_N in gaps]
        read = (torch.cat(each).cpu().split(lengths) for each in (gaps, versions))
        for gap_N, versions_N, version in zip(*read, at, strict=True):
            self._unknown += int((versions_N == UNKNOWN_VERSION).sum())
            for sampled in torch.unique(versions_N[versions_N >= 0]).tolist():
                of_N = gap_N[versions_N == sampled]
                self._add(version - sampled, [of_N.sum().item(), of_N.max().item(), len(of_N)])

    def _add(self, lag: int, row: Sequence[float]) -> None:
        total, most, count = self._by_lag.get(lag, (0.0, 0.0, 0))
        # torch's max, unlike Python's, keeps a NaN
        self._by_lag[lag] = [total + row[0], row[1] if math.isnan(row[1]) else max(most, row[1]), count + row[2]]

    def numbers(self) -> tuple[list[tuple[int, GapRow]], int]:
        """Return all of it as plain data; `of` takes it back."""
        return list(self.by_lag.items()), self.unknown

    @classmethod
    def of(cls, numbers: tuple[Sequence[tuple[int, GapRow]], int]) -> Gap:
        return cls(dict(numbers[0]), numbers[1])

    def join(self, other: Gap) -> None:
        self._unknown += other.unknown
        for lag, row in other.by_lag.items():
            self._add(lag, row)


class GapWatch:
    """Refuses batches whose gap exceeds the limit, and remembers what the limit is made of."""

    def __init__(self, limit: float | CalibratedLimit) -> None:
        self._given = limit
        self._limit = limit if isinstance(limit, float | int) else math.nan
        self._moves: list[float] = []
        self._measured: list[float] = []
        """What the latest updates moved, one for each version, the newest last."""
        self._told = False
        self.on_limit: Callable[[Any, str], None] = lambda requested, text: None
        """Called once, with what the spec asks for and with the limit that holds."""

    def state(self) -> dict[str, Any]:
        return {
            "limit": None if math.isnan(self._limit) else self._limit,
            "moves": self._moves,
            "measured": self._measured,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._moves = list(state["moves"])
        self._measured = list(state.get("measured", ()))
        if isinstance(self._given, CalibratedLimit) and state["limit"] is not None:
            self._limit = state["limit"]

    def moved(self, nats: float) -> Metrics:
        """Note what the update that made a version moved."""
        if not math.isfinite(nats):
            self._measured = []
            return {}
        self._measured = [*self._measured, nats][-_MEASURED_KEPT:]
        return {"update/moved": nats}

    def check(self, gap: Gap) -> None:
        """Raise LogprobGap if the batch's gap exceeds the limit, at any lag."""
        for lag, (total, most, count) in sorted(gap.by_lag.items()):
            mean, limit = total / count, self._limit_at(lag)
            if not mean > limit:  # a NaN is not refused here: its batch is set aside
                continue
            if lag:
                raise LogprobGap(
                    f"sync: trainer and engine differ by {mean:.4f} nats per token (at most {most:.4f}) on tokens that "
                    f"are {lag} version{'s' if lag > 1 else ''} old, and the limit is {limit:.4f}: "
                    f"train.max_logprob_gap and {self._allowance(lag):.4f} for what the policy moved: the tokens are "
                    "of another version than their stamp says, or train.lr moves the policy too far; lower train.lr or "
                    "train.max_lag, or see docs/troubleshooting.md"
                )
            raise LogprobGap(
                f"sync: trainer and engine differ by {mean:.4f} nats per token (at most {most:.4f}) on tokens of "
                f"the same version, and train.max_logprob_gap = {self._named(limit)}: the engine serves other weights "
                "than the trainer's, or samples from another distribution than it reports"
            )

    def accept(self, gap: Gap) -> Metrics:
        """Check the whole batch, learn from it, and return its metrics."""
        self.check(gap)
        sampled = sum(row[2] for row in gap.by_lag.values()) + gap.unknown
        if not sampled:
            return {}
        metrics: Metrics = {"sync/logprob_gap_seen": 1.0 - gap.unknown / sampled}
        if current := gap.by_lag.get(0):
            mean = current[0] / current[2]
            self._calibrate(mean, int(current[2]))
            metrics |= {"sync/logprob_gap": mean, "sync/logprob_gap_max": current[1]}
        older = [(lag, row) for lag, row in gap.by_lag.items() if lag]
        if older:
            total, count = (sum(row[column] for _, row in older) for column in (0, 2))
            metrics["sync/logprob_gap_older"] = total / count
            if math.isfinite(limit := self._limit_at(min(lag for lag, _ in older))):
                metrics["sync/logprob_gap_older_limit"] = limit
            self._moves = [*self._moves, *(row[0] / row[2] / lag for lag, row in older)][-_MOVES_KEPT:]
        if math.isfinite(self._limit):
            metrics["sync/logprob_gap_limit"] = self._limit
        return metrics

    def _calibrate(self, mean: float, count: int) -> None:
        if math.isnan(self._limit) and isinstance(self._given, CalibratedLimit):
            self._limit = max(self._given.floor, _TIMES * mean)
            why = f"{self._limit:.4f} nats: {_TIMES:g} x the first batch's gap of {mean:.2g} over {count:,} tokens, or "
            self._tell("auto", f"{why}{self._given.floor:.2g} if that is more ({self._given.why})")
        elif math.isfinite(self._limit):
            self._tell(self._given if isinstance(self._given, float | int) else "auto", f"{self._limit:.4f} nats")

    def _tell(self, requested: Any, text: str) -> None:
        if not self._told:
            self._told = True
            _log.info("train.max_logprob_gap: %s", text)
            self.on_limit(requested, text)

    def _limit_at(self, lag: int) -> float:
        limit = self._limit
        if math.isnan(limit) and isinstance(self._given, CalibratedLimit):
            limit = self._given.ceiling
        return limit + self._allowance(lag)

    def _allowance(self, lag: int) -> float:
        """Return what a token may differ by because it is `lag` versions old."""
        usual = 4 * statistics.median(self._moves) if self._moves else _MOST
        bound = lag * min(max(usual, _LEAST), _MOST)
        if 0 < lag <= len(self._measured):
            bound = min(bound, _MEASURED_TIMES * sum(self._measured[-lag:]))
        return bound

    def _named(self, limit: float) -> str:
        if isinstance(self._given, CalibratedLimit):
            first = "for the first batch" if math.isnan(self._limit) else "by the first batch"
            return f"'auto' ({limit:.4f} {first}; {self._given.why})"
        return f"{limit:g}"
