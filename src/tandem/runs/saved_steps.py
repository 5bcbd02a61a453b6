"""Which steps of a run were saved, and which of them are still there: the ones that can be deployed or resumed from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.io.jsonl import salvage_jsonl
from tandem.obs.run_history import evaluations, number, read_history
from tandem.runs.checkpoints import Checkpoints
from tandem.spec.checkpoint import CheckpointSpec
from tandem.spec.load import parse_spec

Row = Mapping[str, Any]


def saved_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the saved steps, the newest first, with the held-out score and the reward of each. A mirror of a run has
    no checkpoints: there `kept` is what the run's own settings say."""
    events = salvage_jsonl(run_dir / "events.jsonl").rows.values()
    saved = {int(row["step"]): str(row.get("at", "")) for row in events if row.get("stage") == "checkpoint"}
    history = read_history(run_dir)
    rows = {int(row["step"]): row for row in history.rows}
    scores = {each.step: each.value for each in evaluations(history)}
    there = set(Checkpoints(run_dir).versions())
    if not (run_dir / "checkpoints").is_dir():
        there = kept_steps(sorted(saved), parse_spec(tomllib.loads(history.spec)).checkpoint, best_step(history.rows))
    return [
        {
            "step": step, "saved_at": saved.get(step, ""), "kept": step in there, "held_out": scores.get(step),
            "reward": number(rows.get(step, {}).get("reward/mean")),
        }
        for step in sorted({*saved, *there}, reverse=True)
    ]  # fmt: skip


def kept_steps(saved: Sequence[int], spec: CheckpointSpec, best: int | None) -> set[int]:
    """Return those of the saved steps, oldest first, that are not deleted. `best`: of the best evaluation."""
    kept = set(saved[-spec.keep_last :])
    if spec.keep_every:
        kept |= {each for each in saved if each % spec.keep_every == 0}
    if best is not None and spec.keep_best:
        kept |= {best} & {*saved}
    return kept


def score(metrics: Row) -> float | None:
    """Return what checkpoints are ranked by: higher is better. None for a step without an evaluation."""
    value = metrics.get("eval/accuracy", metrics.get("eval/reward"))
    if value is None and "eval/loss" in metrics:
        return -metrics["eval/loss"]
    return value


def best_step(rows: Sequence[Row]) -> int | None:
    """Return the step with the best evaluation, the first of them if several are equal."""
    scored = [(value, int(row["step"])) for row in rows if (value := score(row)) is not None]
    return max(scored, key=lambda each: each[0])[1] if scored else None
