"""Watch a run from another terminal: `tandem watch DIR`. It only reads, and continues when the run is resumed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tandem.io.bounded_json import parsed
from tandem.io.process_identity import is_there
from tandem.obs.claims import printable
from tandem.obs.readings import readings
from tandem.obs.run_history import number, read_status
from tandem.runs.failure_diagnosis import what_to_do
from tandem.runs.liveness import Observer, read_sign
from tandem.runs.supervise import ATTEMPTS, supervisor_of

_TAIL_BYTES = 1 << 16
_EVENTS_SHOWN = 8
_ENDED = ("succeeded", "failed", "cancelled", "stopped")

Row = dict[str, Any]


def watch_run(
    run_dir: str | Path,
    *,
    once: bool = False,
    as_json: bool = False,
    tell: Callable[[str], None] = print,
    poll_s: float = 1.0,
    see: Callable[[], Row] | None = None,
) -> str:
    """Print a run's progress until it has ended, or once; return its state. A run that a supervisor will restart has
    not ended, nor has one whose process vanished: it may be resumed. `see`: looks at the run in another way than by
    its directory, with the keys of `look`."""
    directory, observer = Path(run_dir), Observer()
    said = _AlreadyPrinted()
    while True:
        sight = look(directory, observer) if see is None else see()
        if as_json:
            if once or said.is_new(sight):
                tell(json.dumps(sight, ensure_ascii=False))
        else:
            for line in [*_text(sight)] if once else [*said.lines(sight)]:
                tell(printable(line))
        if once or (sight["liveness"] == "ended" and not sight["supervised"]):
            return str(sight["state"])
        time.sleep(poll_s)


def last_row(run_dir: Path) -> Row:
    """Return the last row of metrics.jsonl; empty if there is none."""
    rows = _tail(run_dir / "metrics.jsonl", 1)
    return rows[0] if rows else {}


def look(run_dir: Path, observer: Observer | None = None) -> Row:
    """Return the state of a run, as `--json` prints it. Only with an observer, called repeatedly, does `liveness` say
    whether the run makes progress; without one it is `there` if the process exists."""
    status = read_status(run_dir)
    sign = read_sign(run_dir)
    there = sign is not None and is_there(sign.process)
    stands = observer.look(sign if there else None) if observer is not None else False
    state = str(status.get("state", "queued"))
    return {
        "run": str(run_dir),
        "state": state,
        "stage": sign.stage if sign is not None else "",
        "step": sign.step if sign is not None else int(number(status.get("steps_done")) or 0),
        "steps_total": int(number(status.get("steps_total")) or 0),
        "liveness": _liveness(state, there=there, stands=stands, looked=observer is not None),
        "quiet_s": round(observer.quiet_s, 1) if observer is not None and there else None,
        "limit_s": sign.limit_s if sign is not None else None,
        "metrics": last_row(run_dir),
        "events": _tail(run_dir / "events.jsonl", _EVENTS_SHOWN),
        "verdict": status.get("verdict"),
        "error": status.get("error"),
        "failure": status.get("failure"),
        "attempts": _tail(run_dir / ATTEMPTS, _EVENTS_SHOWN),
        "supervised": is_there(supervisor_of(run_dir)),
    }


def _liveness(state: str, *, there: bool, stands: bool, looked: bool) -> str:
    if state in _ENDED and not there:
        return "ended"
    if not there:
        return "gone" if state == "running" else "not begun"
    if stands:
        return "stalled"
    return "moves" if looked else "there"


class _AlreadyPrinted:
    """Remembers what was printed, so that `lines` yields only what is new."""

    def __init__(self) -> None:
        self._event = 0
        self._attempts = 0
        self._place: tuple[Any, ...] = ()
        self._state: tuple[Any, ...] = ()

    def is_new(self, sight: Row) -> bool:
        return bool([*self.lines(sight)])

    def lines(self, sight: Row) -> Iterator[str]:
        for event in sight["events"]:
            if (at := int(event.get("number", 0))) > self._event:
                self._event = at
                yield f"event {_event(event)}"
        for attempt in sight["attempts"]:
            if int(attempt.get("attempt", 0)) > self._attempts:
                self._attempts = int(attempt.get("attempt", 0))
                yield f"attempt {self._attempts}: {attempt.get('then') or 'not again'}"
        place = (sight["stage"], sight["step"], sight["metrics"].get("step"))
        if place != self._place:
            self._place = place
            yield _place(sight)
        state = (sight["state"], sight["liveness"])
        if state != self._state:
            self._state = state
            yield from _state(sight)


def _text(sight: Row) -> Iterator[str]:
    yield _place(sight)
    yield from _state(sight)
    yield from (f"event {_event(event)}" for event in sight["events"])
    yield from (f"attempt {row.get('attempt')}: {row.get('then') or 'not again'}" for row in sight["attempts"])


def _place(sight: Row) -> str:
    total = f"/{sight['steps_total']:,}" if sight["steps_total"] else ""
    numbers = [f"{label} {text}" for label, text in readings(sight["metrics"])]
    return " · ".join([f"{sight['stage'] or 'not begun'} step {sight['step']:,}{total}", *numbers])


def _state(sight: Row) -> Iterator[str]:
    more = {
        "gone": f"its process is gone; `tandem resume {sight['run']}` continues it",
        "stalled": f"no progress for {sight['quiet_s']} s; the limit of its stage is {sight['limit_s']:g} s"
        if sight["limit_s"]
        else "no progress",
    }.get(sight["liveness"], "")
    yield " · ".join(filter(None, [f"{sight['state']}, {sight['liveness']}", more, str(sight["verdict"] or "")]))
    if sight["error"] and sight["state"] != "running":
        yield f"   {sight['error']}"
    if isinstance(failure := sight["failure"], dict):
        yield f"   {what_to_do(cast('Row', failure))}"


def _event(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("number", "at", "stage")}
    told = ", ".join(f"{key} {value}" for key, value in rest.items() if value not in ("", None))
    return f"{event.get('number')} {event.get('stage')}{': ' + told if told else ''}"


def _tail(path: Path, count: int) -> list[Row]:
    """Return the last complete rows; cut or damaged ones are skipped."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    rows: list[Row] = []
    for line in lines[-count:]:
        try:
            row = parsed(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(cast("Row", row))
    return rows
