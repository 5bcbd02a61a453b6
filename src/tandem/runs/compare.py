"""Compare runs: their specs, their results, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from tandem.errors import RunError
from tandem.obs.claims import ends, figure, printable
from tandem.obs.run_history import History, largest, number, read_history, timing, total
from tandem.obs.text_charts import sparkline
from tandem.runs.eval_files import StoredEval, read_evals
from tandem.runs.verdict import Verdict, judge
from tandem.spec.toml import parse_toml

_UNLIKE = ("name",)  # does not change what a run does


@dataclass(frozen=True, slots=True)
class Pairing:
    """The last evaluations of two runs."""

    first: str
    other: str
    paired: bool
    why_not: str = ""
    verdict: Verdict | None = None
    """Compares `other` with `first`; None unless both scored the same tasks in the same way."""


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: Sequence[str]
    facts: Sequence[Mapping[str, Any]]
    """One mapping per run, in the same order."""
    differences: Mapping[str, Sequence[Any]]
    """Spec fields that differ between the runs, with each run's value; None if its spec lacks the field."""
    pairings: Sequence[Pairing]
    """Comparison of each other run with the first."""
    curves: Sequence[Sequence[float | None]]


def compare_runs(directories: Sequence[str | Path], *, confidence: float = 0.95) -> Comparison:
    """Compare two or more runs with the first of them."""
    places = [Path(directory) for directory in directories]
    if len(places) < 2:
        raise RunError("compare: name two runs or more")
    histories = [read_history(directory) for directory in places]
    names = _names(places)
    last = [_last(directory) for directory in places]
    pairings = [
        _pair(names[0], last[0], name, each, confidence) for name, each in zip(names[1:], last[1:], strict=True)
    ]
    return Comparison(
        runs=names,
        facts=[_facts(history) for history in histories],
        differences=_differences([_flat(parse_toml(each.spec, each.directory / "spec.toml")) for each in histories]),
        pairings=pairings,
        curves=[_curve(history) for history in histories],
    )


def compare_json(found: Comparison) -> dict[str, Any]:
    return {**asdict(found), "curves": [list(curve) for curve in found.curves]}


def compare_text(found: Comparison) -> str:
    rows = [["", *found.runs]]
    rows += [[label, *(_cell(facts.get(label)) for facts in found.facts)] for label in found.facts[0]]
    rows.append(["curve", *(sparkline(curve, 20) for curve in found.curves)])
    lines = _table(rows)
    lines += ["", "specs:"] + (
        _table([["", *found.runs], *([key, *map(_cell, values)] for key, values in found.differences.items())])
        if found.differences
        else ["  equal in every field"]
    )
    lines += ["", *(pairing_text(pairing) for pairing in found.pairings)]
    return "\n".join(printable(line.rstrip()) for line in lines)


def pairing_text(pairing: Pairing) -> str:
    """Return whether one run is better than the first, in a sentence."""
    if pairing.verdict is None:
        return f"{pairing.other} against {pairing.first}: not compared, {pairing.why_not}"
    low, high = pairing.verdict.interval
    return (
        f"{pairing.other} against {pairing.first}: {pairing.verdict.verdict}, {pairing.verdict.difference:+.4g} "
        f"[{low:+.4g}, {high:+.4g}], {pairing.verdict.tasks} tasks in pairs"
        + (f": {pairing.verdict.why}" if pairing.verdict.why else "")
    )


def _pair(first: str, a: StoredEval | None, other: str, b: StoredEval | None, confidence: float) -> Pairing:
    if a is None or b is None:
        return Pairing(first, other, False, f"{other if b is None else first} has no stored evaluation")
    if not a.pairs_with(b):
        differing = sorted(key for key in {*a.protocol, *b.protocol} if a.protocol.get(key) != b.protocol.get(key))
        return Pairing(first, other, False, f"the evaluations differ in {', '.join(differing) or 'tasks'}")
    return Pairing(first, other, True, "", judge(a.scores, b.scores, confidence=confidence, measure=a.metric))


def _last(directory: Path) -> StoredEval | None:
    """Return the first evaluation of the latest version; in a finished run that is the run's own final evaluation."""
    found = read_evals(directory)
    newest = max((each.version for each in found), default=0)
    return next((each for each in found if each.version == newest), None)


def _facts(history: History) -> dict[str, Any]:
    status, rows = history.status, history.rows
    before, after = ends(status)
    seconds = total(rows, "time/step_s")
    facts: dict[str, Any] = {
        "state": status.get("state"),
        "verdict": status.get("verdict"),
        "before": None if before is None else figure(status, before),
        "after": None if after is None else figure(status, after),
        "steps": status.get("steps_done"),
        "tokens trained on": int(total(rows, "tokens/trained")),
        "seconds in steps": round(seconds, 1),
        "seconds a step": round(seconds / len(rows), 3) if rows else None,
    }
    facts |= {f"  {share.label}": f"{share.share:.0%}" for share in timing(history)}
    peak = largest(rows, "memory/peak")
    return facts | {"peak memory (GiB)": None if peak is None else round(peak, 2)}


def _curve(history: History) -> list[float | None]:
    key = "reward/mean" if any("reward/mean" in row for row in history.rows) else "loss/total"
    return [number(row.get(key)) for row in history.rows if key in row]


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(cast("dict[str, Any]", value), f"{above}{key}.")
        else:
            found[above + key] = value
    return found


def _differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for spec in specs for key in spec if key not in _UNLIKE)
    values = {key: [spec.get(key) for spec in specs] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each[1:])}


def _names(directories: Sequence[Path]) -> list[str]:
    names = [directory.resolve().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def _cell(value: Any) -> str:
    return (
        "" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
