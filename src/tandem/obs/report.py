"""Write `report.html`: one file that explains a run, without external resources.

The template escapes all text of models, specs and logs (autoescape). In addition, a content security policy blocks
requests, and all scripts but the two that draw the charts, which it knows by their hashes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.io.atomic_write import write_bytes
from tandem.io.bounded_json import read_json
from tandem.io.kept_samples import first_and_last_step, samples
from tandem.obs.chart_data import chart_data, scripts
from tandem.obs.claims import (
    caveat,
    change,
    ends,
    evidence,
    figure,
    headline,
    interval,
    interval_name,
    interval_text,
)
from tandem.obs.curves import curves_png
from tandem.obs.look import LOOK
from tandem.obs.plan_vs_measured import against_plan
from tandem.obs.reward_lines import reward_lines
from tandem.obs.run_history import History, drops, evaluations, largest, number, read_history, timing, total
from tandem.types import text_of

if TYPE_CHECKING:
    from jinja2 import Template

_SHOWN_TASKS = 8
_SHOWN_CHARACTERS = 6000


def write_report(run_dir: str | Path, beside: Sequence[str | Path] = ()) -> Path:
    """Write curves.png and report.html, for a run in any state; return the report's path. `beside`: other runs, whose
    curves are drawn over it, in report-beside.html."""
    run_dir = Path(run_dir)
    others = [read_history(Path(other)) for other in beside]
    page = _template().render(_content(read_history(run_dir), others))
    path = run_dir / ("report-beside.html" if others else "report.html")
    write_bytes(path, page.encode("utf-8", errors="replace"))  # a model can write half a surrogate pair
    return path


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))


def _content(history: History, others: Sequence[History] = ()) -> dict[str, Any]:
    return {
        **result_of(history),
        "curves": _curves(history),
        "charts": chart_data([history, *others]),
        "look": LOOK.read_text(encoding="utf-8"),
        "scripts": scripts(),
        "is_running": history.status.get("state") == "running",
        "samples": _samples(history.samples),
        "training_samples": _training_samples(history.directory),
        "spec": history.spec,
        "log_tail": history.log_tail,
    }


def result_of(history: History) -> dict[str, Any]:
    """Return what a run came to, in words and figures: for report.html and for the dashboard."""
    status = history.status
    return {
        "name": history.name,
        "state": str(status.get("state", "unknown")),
        "verdict": str(status.get("verdict") or ""),
        "recipe": str(status.get("recipe") or ""),
        "headline": headline(status),
        "evidence": evidence(status),
        "caveat": caveat(status),
        "error": str(status.get("error") or ""),
        "gauge": _gauge(history),
        "facts": _facts(history),
        "evaluations": _evaluations(history),
        "measure": history.measure,
        "has_baseline": ends(status)[0] is not None,
        "baseline": "before RL" if "before_rl" in history.eval else "before",
        "interval_name": interval_name(status) if interval(status) else "",
        "rewards": reward_lines(history.rows),
        "timing": timing(history),
        "planned": against_plan(history),
        "drops": drops(history),
        "memory": _memory(history),
        "sync": _sync(history),
    }


def _gauge(history: History) -> dict[str, float] | None:
    """Return before, after and the interval as positions on a line, in percent of its length."""
    before, after = ends(history.status)
    if before is None or after is None or min(before, after) < 0:
        return None
    scale = 1.0 if history.measure == "accuracy" else max(before, after) * 1.05
    low, high = interval(history.status) or (after - before, after - before)
    places = {"before": before, "after": after, "low": before + low, "high": before + high}
    return {name: min(max(100 * value / (scale or 1.0), 0.0), 100.0) for name, value in places.items()}


def _facts(history: History) -> list[tuple[str, str]]:
    status, rows = history.status, history.rows
    facts = [("steps", f"{status.get('steps_done', len(rows))} of {status.get('steps_total', '?')}")]
    if trained := total(rows, "tokens/trained"):
        facts.append(("tokens trained on", f"{trained:,.0f}"))
    if seconds := total(rows, "time/step_s"):
        facts.append(("time in steps", _duration(seconds)))
    if (lag := largest(rows, "lag/max")) is not None:
        facts.append(("largest lag", f"{lag:.0f} {'version' if lag == 1 else 'versions'}"))
    if (gap := largest(rows, "sync/logprob_gap")) is not None:
        limit = largest(rows, "sync/logprob_gap_limit")
        facts.append(("largest logprob gap", f"{gap:.2g}" + (f", limit {limit:.2g}" if limit is not None else "")))
    if (gap := largest(rows, "sync/logprob_gap_older")) is not None:
        limit = largest(rows, "sync/logprob_gap_older_limit")
        facts.append(("the same of older tokens", f"{gap:.2g}" + (f", limit {limit:.2g}" if limit is not None else "")))
    if seen := [row["sync/logprob_gap_seen"] for row in rows if "sync/logprob_gap_seen" in row]:
        facts.append(("trained tokens whose logprobs were compared", f"{100 * sum(seen) / len(seen):.1f} %"))
    return facts + _own_code(history)


def _own_code(history: History) -> list[tuple[str, str]]:
    """Return the user's own code that the run used, with its digest and the steps after which it changed."""
    path = history.directory / "code.json"
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return []
    facts: list[tuple[str, str]] = []
    for field, code in record.items():
        changes = ", ".join(str(each["last_step"]) for each in code["earlier"])
        text = f"{Path(code['name']).name} (SHA-256 {code['sha256'][:12] or 'unknown'})"
        facts.append((str(field), f"{text}; changed after step {changes}" if changes else text))
    return facts


def _evaluations(history: History) -> list[dict[str, Any]]:
    status, (baseline, _) = history.status, ends(history.status)
    found = evaluations(history)
    full = [1.0] if history.measure == "accuracy" else [abs(item.value) for item in found]
    scale = max(full, default=1.0) or 1.0
    return [
        {
            "label": item.label,
            "step": item.step,
            "value": figure(status, item.value),
            "width": max(0.0, 100 * item.value / scale),
            "change": "" if baseline is None or item.value == baseline else change(status, item.value - baseline),
            "interval": interval_text(status) if item.is_final else "",
        }
        for item in found
    ]


def _curves(history: History) -> str:
    """Return the curves as an embedded picture, the same as curves.png."""
    if not history.rows:
        return ""
    evals = [(item.step, item.value) for item in evaluations(history)]
    picture = curves_png(history.rows, history.name, evals=evals, measure=history.measure)
    write_bytes(history.directory / "curves.png", picture)
    return base64.b64encode(picture).decode("ascii")


def _sync(history: History) -> list[tuple[str, str]]:
    """Return a summary of the ledger."""
    ledger = history.ledger
    if not ledger:
        return []
    modes = sorted({str(row.get("mode", "unknown")) for row in ledger})
    unproven = sum(row.get("verified") in (None, "none") for row in ledger)
    engines = {str(engine) for row in ledger for engine in row.get("engines") or ()}
    seconds = [took for row in ledger if (took := number((row.get("seconds") or {}).get("total"))) is not None]
    facts = [
        ("versions published", f"{len(ledger):,}"),
        ("path", ", ".join(modes)),
        ("proven to be the trainer's weights", f"{len(ledger) - unproven:,} of {len(ledger):,}"),
        ("bytes moved", _bytes(total(ledger, "bytes_moved"))),
    ]
    if seconds:
        facts.append(("time", f"{sum(seconds) / len(seconds) * 1000:.1f} ms each"))
        facts.append(("slowest", f"{max(seconds) * 1000:.1f} ms"))
    if engines:
        facts.append(("engine starts", f"{len(engines)}"))
    return facts


def _memory(history: History) -> list[dict[str, Any]]:
    """Return the largest value of each component over the steps in GiB, the peak of their sum, and the measured
    peak."""
    named = {key.removeprefix("memory/"): largest(history.rows, key) for key in _memory_keys(history)}
    found = {name: value for name, value in named.items() if value}
    if not found:
        return []
    totals = [("accounted", "accounted for, at the peak"), ("peak", "measured peak, of the process or on the GPU")]
    parts = sorted((name for name in found if name not in dict(totals)), key=lambda name: -found[name])
    labelled = [(name, name.replace("_", " ")) for name in parts] + [(name, text) for name, text in totals]
    scale = max(found.values())
    return [
        {"label": label, "gib": f"{found[name]:.3g}", "width": 100 * found[name] / scale, "total": name in dict(totals)}
        for name, label in labelled
        if name in found
    ]


def _memory_keys(history: History) -> list[str]:
    return sorted({key for row in history.rows for key in row if key.startswith("memory/")})


def _samples(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first tasks, each with the answers of successive versions."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: number(row.get("version")) or 0.0):
        by_task.setdefault(str(row.get("task", "?")), []).append(_play(row, _when(row)))
    return [{"task": task, "plays": plays} for task, plays in list(by_task.items())[:_SHOWN_TASKS]]


def _training_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return the first and the last step that were kept, each with its worst, its middle and its best answer."""
    found = list[dict[str, Any]]()
    for step in first_and_last_step(run_dir):
        rows = sorted(samples(run_dir, steps=step), key=lambda row: row["reward"] or 0.0)
        chosen = {0: "lowest reward", len(rows) // 2: "middle", len(rows) - 1: "highest reward"}
        found.append({"step": step, "plays": [_play(rows[at], what) for at, what in sorted(chosen.items())]})
    return found


def _play(row: Mapping[str, Any], when: str) -> dict[str, Any]:
    reward = number(row.get("reward"))
    turns = [turn for turn in row.get("messages") or () if isinstance(turn, Mapping)]
    return {
        "when": when,
        "reward": "–" if reward is None else f"{reward:g}",
        "messages": [(str(turn.get("role", "?")), _cut(text_of(turn.get("content")))) for turn in turns],
    }


def _when(row: Mapping[str, Any]) -> str:
    when = str(row.get("when", "")).replace("_rl", " RL").replace("_", " ")
    version = number(row.get("version"))
    return when if version is None or when.startswith("step ") else f"{when} (version {version:.0f})"


def _cut(text: str) -> str:
    left_out = len(text) - _SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:_SHOWN_CHARACTERS]}\n… {left_out:,} more characters"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
