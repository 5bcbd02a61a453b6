"""List the runs of a directory: `tandem runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tandem.errors import RunError
from tandem.io.bounded_json import read_json
from tandem.io.process_identity import is_there
from tandem.obs.claims import change_of, figure_of
from tandem.obs.run_history import measure_of, number
from tandem.runs.liveness import read_sign
from tandem.runs.watch import last_row

Row = dict[str, Any]

_ENDED = ("succeeded", "failed", "cancelled", "stopped")


def list_runs(directory: str | Path = "runs") -> list[Row]:
    """Return a row for each run in `directory`, the newest last: name, state, verdict, steps, reward, evaluation. A run
    whose process has vanished is `gone`; `tandem resume` continues it."""
    place = Path(directory)
    if not place.is_dir():
        raise RunError(f"{place}: is not a directory; name the one that holds your runs, or train first")
    paths = [path for path in place.iterdir() if (path / "spec.toml").exists()]
    return [run_row(path) for path in sorted(paths, key=lambda path: (path / "spec.toml").stat().st_mtime)]


def run_row(run_dir: Path) -> Row:
    """Return the row of one run."""
    try:
        found: object = read_json(run_dir / "status.json")
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        return {"run": str(run_dir), "state": "damaged", "error": f"status.json: {error}"}
    status = _table(found)
    sign, state = read_sign(run_dir), str(status.get("state", "queued"))
    if state not in _ENDED and not (sign is not None and is_there(sign.process)):
        state = "gone" if status else "not begun"
    evaluation = _table(status.get("eval"))
    before = next(
        (value for name in ("before_rl", "before") if (value := number(evaluation.get(name))) is not None), None
    )
    last = last_row(run_dir)
    return {
        "run": str(run_dir),
        "recipe": str(status.get("recipe") or ""),
        "state": state,
        "verdict": str(status.get("verdict") or ""),
        "step": int(number(last.get("step")) or 0),
        "steps_total": int(number(status.get("steps_total")) or 0),
        "reward": number(last.get("reward/mean")),
        "loss": number(last.get("loss/total")),
        "metric": measure_of(status),
        "before": before,
        "after": number(evaluation.get("after")),
        "error": str(status.get("error") or ""),
    }


def _table(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def runs_text(rows: list[Row]) -> str:
    """Return the rows as a table for a terminal."""
    table = [("run", "state", "verdict", "step", "reward or loss", "evaluation")]
    for row in rows:
        if row["state"] == "damaged":
            table.append((row["run"], "damaged", "", "", "", row["error"]))
            continue
        value = row["loss"] if row["reward"] is None else row["reward"]
        shown = "" if value is None else f"{value:.4g}"
        steps = f"{row['step']}/{row['steps_total']}" if row["steps_total"] else ""
        table.append((row["run"], row["state"], row["verdict"], steps, shown, _evaluation(row)))
    widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _evaluation(row: Row) -> str:
    before, after, metric = row["before"], row["after"], row["metric"]
    if after is None:
        return row["error"].split("\n")[0][:80] or ("" if before is None else f"{figure_of(metric, before)} before")
    moved = "" if before is None else f" ({change_of(metric, after - before)})"
    return f"{figure_of(metric, after)}{moved}"
