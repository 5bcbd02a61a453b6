"""What the pages show of runs on a control plane: its word on where each run stands, beside the run's mirror."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.dashboard.views import Found, Runs, first_line, plain
from tandem.errors import NotKnown, RunError
from tandem.obs.run_history import History, Row, read_history
from tandem.runs.explain import explain_run
from tandem.runs.liveness import read_sign
from tandem.runs.named_runs import sight_of
from tandem.runs.run_list import run_row
from tandem.shapes.runs import ENDED, AttemptInfo, RunInfo

EndedRows = dict[str, tuple[int, Found]]
"""Rows of runs that have ended, by their ids, each with the time of that end."""

_MOST_KEPT = 5000


@dataclass(frozen=True, slots=True)
class Told:
    """What the control plane says of a run."""

    info: RunInfo
    spec: str = ""
    attempts: tuple[AttemptInfo, ...] = ()


class MirroredRuns(Runs):
    """The runs that one request may see, called by their ids. How a run stands, the control plane says: its files are
    as they last came, and a machine that is lost writes nothing."""

    def __init__(self, mirrors: Path, told: Mapping[str, Told], ended: EndedRows) -> None:
        """`ended`: rows of the list that were read before, of runs that have ended; it is added to."""
        super().__init__(mirrors)
        self._told, self._ended = told, ended

    def place(self, name: str) -> Path:
        if name not in self._told:
            raise NotKnown(f"there is no run '{name[:40]}'")
        return self.directory / name

    def all(self) -> Found:
        return {"directory": "this server", "runs": [self._mirrored_row(each.info) for each in self._told.values()]}

    def _mirrored_row(self, info: RunInfo) -> Found:
        before = self._ended.get(info.id)
        if before is not None and before[0] == info.ended_at and info.state in ENDED:
            return before[1]
        place, asked = self.place(info.id), info.want != "run" and info.state not in ENDED
        row, sign = run_row(place), read_sign(place)
        stage = sign.stage if sign is not None and info.state == "running" else ""
        server = {
            "run": info.id, "title": info.name, "state": info.state, "at": info.at,
            "error": first_line(info.why or row["error"]), "project": info.project, "target": info.target,
            "stage": f"{stage}; asked to {info.want}" if asked else stage, "cost_usd": info.cost_usd,
        }  # fmt: skip
        found = plain({"step": 0, "steps_total": 0, **row, **server})
        if info.state in ENDED:
            while len(self._ended) >= _MOST_KEPT:
                self._ended.pop(next(iter(self._ended)))
            self._ended[info.id] = (info.ended_at, found)
        return found

    def sight(self, name: str) -> Found:
        return sight_of(self._told[name].info, self.place(name)) | {"attempts": self._attempts(name)}

    def history(self, name: str) -> History:
        try:
            return read_history(self.place(name))
        except RunError:
            return History(self.place(name), {}, [], [], [], self._told[name].spec, "")

    def explained(self, name: str, rows: Sequence[Row]) -> Found:
        info, ended = self._told[name].info, self._attempts(name)
        return explain_run(self.place(name), name=name, state=info.state, why=info.why, ended=ended, rows=rows)

    def versions(self, name: str) -> Found:
        try:
            return super().versions(name)
        except RunError:
            return {"run": name, "proven": True, "verdict": "It has served no version yet.", "versions": [],
                    "count": 0, "findings": []}  # fmt: skip

    def overview(self, name: str) -> Found:
        found, info = super().overview(name), self._told[name].info
        if info.state in ("queued", "starting", "waiting"):
            found["headline"] = _BEFORE[info.state].format(target=info.target)
        elif info.state in ENDED and found["state"] != info.state:  # its last files came before its end
            found["headline"] = f"{info.state.capitalize()} at step {found['stands']['step']:,}."
        server = {
            "Project": info.project, "Group": info.group, "Target": info.target,
            "Cost so far": f"{info.cost_usd:.2f} USD",
            "May cost": f"{info.max_cost_usd:.2f} USD" if info.max_cost_usd else "any",
        }  # fmt: skip
        facts = [each for each in server.items() if each[1]]
        told = {"at": info.at, "ended_at": info.ended_at, "want": info.want, "facts": facts}
        return found | {"title": info.name, "server": told}

    def _attempts(self, name: str) -> list[Found]:
        return [
            {"attempt": each.n, "why": each.why or each.state, "target": each.target,
             "began": each.claimed_at or each.at, "ended": each.ended_at or each.closed_at}
            for each in self._told[name].attempts
        ]  # fmt: skip


_BEFORE = {
    "queued": "It waits for its turn on {target}.",
    "starting": "Its job on {target} is asked for, and has not begun.",
    "waiting": "Its last attempt failed; a further one follows on {target}.",
}
