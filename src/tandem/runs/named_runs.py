"""Runs by the name that a person has for them: a run directory, or the id of a run on a control server. The mirror of
such a run is pulled first, and is read as a run directory.

The command line imports this at its start, so that what is heavy is imported where it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.client import RemoteRun
    from tandem.shapes.runs import RunInfo

_NOTHING_YET: dict[str, Any] = {
    "stage": "", "step": 0, "steps_total": 0, "quiet_s": None, "limit_s": None, "metrics": {}, "events": [],
    "verdict": None, "error": None, "failure": None, "attempts": [],
}  # fmt: skip


def is_run_id(text: str) -> bool:
    from tandem.shapes.runs import RUN_ID

    return RUN_ID.fullmatch(text) is not None and not Path(text).exists()


def run_directory(text: str | Path) -> Path:
    """Return a run directory: `text` itself, or the mirror of the run with this id, as it is now."""
    if not is_run_id(str(text)):
        return Path(text)
    from tandem.client import Tandem

    with Tandem() as server:
        return server.run(str(text)).pull(mirror_of(str(text))).directory


def mirror_of(run_id: str) -> Path:
    """Return where this machine keeps the mirror of a run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "tandem" / "runs" / run_id


def look_remote(run: RemoteRun, mirror: Path | None = None) -> dict[str, Any]:
    """Look at a run: what its mirror says, and its state, which the control plane says. `mirror`: its directory;
    default: it is pulled."""
    info = run.info()
    return sight_of(info, mirror or run.pull(mirror_of(run.id)).directory)


def sight_of(info: RunInfo, directory: Path) -> dict[str, Any]:
    """Return how a run on a control server stands, from the server's word on it and its mirror."""
    from tandem.client.requests import settled
    from tandem.errors import RunError
    from tandem.runs.watch import look

    try:
        sight = look(directory)
    except RunError:  # its first files have not arrived
        sight = dict(_NOTHING_YET)
    ended = settled(info)
    return sight | {
        "run": info.id,
        "state": info.state,
        "liveness": "ended" if ended else f"attempt {info.attempt}" if info.attempt else "not begun",
        "supervised": False,
        "error": (info.why or info.error or None) if ended or info.state == "waiting" else sight["error"],
    }


def explain_remote(run: RemoteRun, mirror: Path | None = None) -> dict[str, Any]:
    """Say why a run on a control server ended so: what the server says, and what its mirror says."""
    from tandem.runs.explain import explain_run

    info, directory = run.info(), mirror or run.pull(mirror_of(run.id)).directory
    ended = [{"attempt": each.n, "why": each.why or each.state} for each in run.attempts()]
    return explain_run(directory, name=run.id, state=info.state, why=info.why or info.error, ended=ended)
