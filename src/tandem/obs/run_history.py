"""Read a run directory as data, for the report and the closing text. Every file in it may be missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tandem.errors import RunError
from tandem.io.bounded_json import read_json
from tandem.io.jsonl import read_jsonl
from tandem.types import Measure

Row = Mapping[str, Any]
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class History:
    directory: Path
    status: Mapping[str, Any]
    rows: Sequence[Row]
    """metrics.jsonl"""
    ledger: Sequence[Row]
    """sync.jsonl"""
    samples: Sequence[Row]
    spec: str
    log_tail: str

    @property
    def name(self) -> str:
        return str(self.status.get("name") or self.directory.name)

    @property
    def eval(self) -> Mapping[str, Any]:
        found = self.status.get("eval")
        return found if isinstance(found, Mapping) else {}

    @property
    def measure(self) -> Measure:
        return measure_of(self.status)


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """An evaluation on held-out tasks or rows, after `step` optimizer steps."""

    label: str
    step: int
    value: float
    is_final: bool = False
    """Whether the verdict is about this evaluation."""


@dataclass(frozen=True, slots=True)
class Share:
    label: str
    seconds: float
    share: float


def read_history(run_dir: Path) -> History:
    return History(
        directory=run_dir,
        status=read_status(run_dir),
        rows=read_metrics(run_dir),
        ledger=read_jsonl(run_dir / "sync.jsonl"),
        samples=read_jsonl(run_dir / "samples.jsonl"),
        spec=_text(run_dir / "spec.toml"),
        log_tail="\n".join(_text(run_dir / "log.txt").splitlines()[-_LOG_LINES:]),
    )


def read_metrics(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl that have a step."""
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if number(row.get("step")) is not None]


def read_status(run_dir: Path) -> Mapping[str, Any]:
    """Return status.json, or what is known without it. RunError if this is not a run directory."""
    path = run_dir / "status.json"
    if not path.exists():
        if not (run_dir / "spec.toml").exists():
            raise RunError(f"{run_dir} is not a run directory: it has neither status.json nor spec.toml")
        return {}
    try:
        status = read_json(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    return status if isinstance(status, dict) else {}


def measure_of(status: Mapping[str, Any]) -> Measure:
    """Return the measure of a run's held-out scores; without an evaluation, the measure of its recipe."""
    found = status.get("eval")
    metric = found.get("metric") if isinstance(found, Mapping) else None
    known = next((measure for measure in get_args(Measure) if measure == metric), None)
    return known or ("loss" if status.get("recipe") in ("sft", "preference") else "accuracy")


def number(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def evaluations(history: History) -> list[RecordedEvaluation]:
    """Return the evaluations in the order of steps, labelled by their name in status.json if they have one."""
    key = f"eval/{history.measure}"
    by_step = {
        int(row["step"]): RecordedEvaluation(f"after step {int(row['step'])}", int(row["step"]), value)
        for row in history.rows
        if (value := number(row.get(key))) is not None
    }
    warm = max((int(row["step"]) for row in history.rows if row.get("stage") == "warmup"), default=0)
    last = int(number(history.status.get("steps_done")) or 0)
    named = (
        ("before", "before training", 0),
        ("before_rl", "after the warm-up, before RL" if warm else "before RL", warm),
        ("after", "after training" if history.measure == "loss" else "after RL", last),
    )
    for field, label, step in named:
        if (value := number(history.eval.get(field))) is not None:
            by_step[step] = RecordedEvaluation(label, step, value, is_final=field == "after")
    return [by_step[step] for step in sorted(by_step)]


def timing(history: History) -> list[Share]:
    """Return how the steps' seconds were spent. The shares add up to 1 even if generation and training overlap."""
    parts = {part: total(history.rows, f"time/{part}_s") for part in ("generate", "train", "sync", "eval")}
    inside = parts["generate"] + parts["train"] + parts["sync"]
    parts["other"] = max(0.0, total(history.rows, "time/step_s") - inside)
    whole = sum(parts.values())
    return [Share(label, seconds, seconds / whole) for label, seconds in parts.items() if seconds > 0]


def drops(history: History) -> dict[str, int]:
    """Return how many groups were dropped, by reason if the rows name it; most frequent first."""
    prefix = "groups/dropped/"
    reasons = sorted({key for row in history.rows for key in row if key.startswith(prefix)})
    counts = {key.removeprefix(prefix).replace("_", " "): int(total(history.rows, key)) for key in reasons}
    whole = int(total(history.rows, "groups/dropped"))
    if whole > sum(counts.values()):
        counts["reason not recorded"] = whole - sum(counts.values())
    return dict(sorted(((reason, count) for reason, count in counts.items() if count), key=lambda item: -item[1]))


def total(rows: Sequence[Row], key: str) -> float:
    return sum(_values(rows, key))


def largest(rows: Sequence[Row], key: str) -> float | None:
    return max(_values(rows, key), default=None)


def _values(rows: Sequence[Row], key: str) -> Iterator[float]:
    return (value for row in rows if (value := number(row.get(key))) is not None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
