"""Say why a run ended as it did, and what to do next: `tandem explain RUN`. It only reads, and asks no model.

What a run directory says (status.json, attempts.jsonl, the last lines that it wrote) is read by failure_rules.toml. For
a run on a control server it is the mirror, beside what the server says: a machine that is lost writes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tandem.errors import RunError
from tandem.obs.bad_step import first_bad_step
from tandem.obs.run_history import read_metrics, read_status
from tandem.runs.failure_diagnosis import classify_end, kinds
from tandem.runs.watch import look

Row = dict[str, Any]

_LAST_LINES, _LONGEST = 12, 500
BY_SERVER = {  # what tandem.control.decide says, and what its reader can do
    "started no job within": "`tandem targets` says what the target has now, and why a job does not start",
    "its job ended before it claimed": "the job's directory on the target has what it printed, in `console`",
    "its machine ended it, and its lease ran out": "`tandem resume {run}` goes on from the last checkpoint",
    "its machine asked it to end": "`tandem resume {run}` goes on from the last checkpoint",
    "it has cost what it may": "submit it again with a higher --max-cost",
}


def explain_run(
    run_dir: str | Path, *, name: str = "", state: str = "", why: str = "", ended: Sequence[Row] = (),
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> Row:  # fmt: skip
    """Return why a run ended so. `name`: what commands call it; default: the directory. What a control server says
    comes first: `state`, `why`, and `ended`, a row of `attempt` and `why` for each attempt. `rows`: of its
    metrics, if they were read already."""
    directory = Path(run_dir)
    sight: Row = {"liveness": "not begun", "step": 0, "steps_total": 0, "attempts": [], "verdict": None}
    status: Mapping[str, Any] = {}
    try:
        sight, status = look(directory), read_status(directory)
    except RunError:  # nothing has arrived of a run that was lost at its beginning
        if not state:
            raise
    name, here = name or str(directory), str(status.get("state", ""))
    found: Row = {
        "run": name, "state": state or here or "queued", "liveness": sight["liveness"],
        "step": sight["step"], "steps_total": sight["steps_total"], "verdict": sight["verdict"],
        "why": why or str(status.get("error") or ""),
    }  # fmt: skip
    found["attempts"] = [*ended] or [_attempt(row) for row in sight["attempts"]]
    evidence = _evidence(directory)
    failure = _failure(found, status, evidence)
    bad = first_bad_step(read_metrics(directory) if rows is None else rows)
    return found | {
        "failure": failure, "next": _next(found, failure), "bad_step": asdict(bad) if bad else None,
        "evidence": evidence if failure else [],
    }  # fmt: skip


def explain_text(found: Row) -> Iterator[str]:
    """Yield the explanation as lines."""
    total = f" of {found['steps_total']:,}" if found["steps_total"] else ""
    yield f"{found['run']}: {_said_state(found)}, at step {found['step']:,}{total}"
    if found["why"]:
        yield f"   why: {found['why']}"
    if found["verdict"]:
        yield f"   verdict: {found['verdict']}"
    if failure := found["failure"]:
        rule = f", rule {failure['rule']}" if failure["rule"] else ""
        yield f"   failure class {failure['class']}{rule}: {failure['about']}"
    if bad := found["bad_step"]:
        yield f"   first bad step {bad['step']:,}: {bad['why']} ({bad['metric']})"
    yield f"   next: {found['next']}"
    yield from (f"   attempt {row['attempt']}: {row['why']}" for row in found["attempts"])
    if found["evidence"]:
        yield f"   the last lines of {found['evidence'][0]['file']}:"
        yield from (f"   {row['line']:>6}  {row['text']}" for row in found["evidence"])


def _said_state(found: Row) -> str:
    if found["state"] == "running" and found["liveness"] == "gone":
        return "its process is gone, and it has not ended"
    return str(found["state"])


def _failure(found: Row, status: Mapping[str, Any], evidence: Sequence[Row]) -> Row | None:
    """Return the failure that status.json names; of a failed run that wrote none, the one that its last lines show."""
    if found["state"] != "failed":
        return None
    told = status.get("failure")
    if status.get("state") == "failed" and isinstance(told, dict):
        row = dict(cast("Row", told))
    else:
        row = classify_end("\n".join([*(str(each["text"]) for each in evidence), found["why"]])).row()
    kind = kinds().get(row.get("class", "unknown"), kinds()["unknown"])
    return row | {"about": kind.about}


def _next(found: Row, failure: Row | None) -> str:
    run, state = found["run"], found["state"]
    for said, then in BY_SERVER.items():
        if said in found["why"]:
            return then.format(run=run)
    if failure is not None:
        again = f"; then `tandem resume {run}`" if failure["retriable"] else ""
        return f"{failure['next']}{again}"
    if state in ("stopped", "cancelled") or (state == "running" and found["liveness"] == "gone"):
        return f"`tandem resume {run}` goes on from the last checkpoint"
    if state == "succeeded":
        return f"nothing is wrong; `tandem report {run}` draws its curves"
    return f"it has not ended; `tandem watch {run}` follows it"


def _attempt(row: Mapping[str, Any]) -> Row:
    failure = row.get("failure")
    name = cast("Row", failure)["class"] if isinstance(failure, dict) else f"exit code {row.get('exit_code')}"
    return {"attempt": row.get("attempt"), "why": f"{name}: {row.get('then') or 'not again'}"}


def _evidence(directory: Path) -> list[Row]:
    """Return the last lines that the run wrote: of its log, or of what its process printed."""
    for file in ("console.txt", "log.txt"):
        try:
            with (directory / file).open(encoding="utf-8", errors="replace") as opened:
                said = ((n, line.rstrip()[:_LONGEST]) for n, line in enumerate(opened, 1))
                last = deque((each for each in said if each[1]), _LAST_LINES)
        except OSError:
            continue
        if last:
            return [{"file": file, "line": n, "text": text} for n, text in last]
    return []
