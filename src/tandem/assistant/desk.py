"""Where the tools of one caller find runs: in a directory and on the control server of `tandem login`, or, inside a
control server, its own runs with the caller's key."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tandem.assistant import reading
from tandem.assistant.reading import Row
from tandem.assistant.spending import PlanSummary, Spending
from tandem.client import Tandem, find_place
from tandem.errors import RunError
from tandem.recipes.targets import list_targets
from tandem.runs.explain import explain_run
from tandem.runs.named_runs import explain_remote, is_run_id, look_remote, run_directory
from tandem.runs.run_list import list_runs
from tandem.runs.watch import look
from tandem.spec.load import parse_spec


class Desk(Protocol):
    """What the tools need to know of runs, for one caller."""

    spending: Spending

    def server(self) -> AbstractContextManager[Tandem] | None:
        """Return a client of the control server, if there is one."""
        ...

    def here(self) -> list[Row]:
        """Return the runs beside those of the control server, the newest first."""
        ...

    def place(self, run: str) -> Path:
        """Return the directory of a run that this caller may read."""
        ...

    def sight(self, run: str) -> Row:
        """Return how a run stands."""
        ...

    def explained(self, run: str) -> Row:
        """Return why a run ended so."""
        ...

    def targets(self) -> list[Row]: ...

    def estimate(
        self, spec: Mapping[str, Any], target: str, gpu: str, prompt_tokens: int, row_tokens: int
    ) -> PlanSummary:
        """Plan a spec. It reads no data and runs no code that the spec names."""
        ...


class FolderDesk:
    """A directory of runs, and the control server of `tandem login`."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.spending = runs, Spending()

    def server(self) -> Tandem | None:
        return None if find_place() is None else Tandem()

    def here(self) -> list[Row]:
        rows = list_runs(self.runs)[::-1] if self.runs.is_dir() else []
        return [{**row, "run": Path(row["run"]).name, "place": "here"} for row in rows]

    def place(self, run: str) -> Path:
        return run_directory(run) if is_run_id(run) else reading.place_of(self.runs, run)

    def sight(self, run: str) -> Row:
        if is_run_id(run):
            with Tandem() as server:
                return look_remote(server.run(run))
        place = self.place(run)
        return look(place) | reading.verdict_of(place)

    def explained(self, run: str) -> Row:
        if is_run_id(run):
            with Tandem() as server:
                return explain_remote(server.run(run))
        return explain_run(self.place(run))

    def targets(self) -> list[Row]:
        if (found := self.server()) is None:
            return [asdict(each) for each in list_targets()]
        with found as server:
            return [each.model_dump(mode="json") for each in server.targets()]

    def estimate(
        self, spec: Mapping[str, Any], target: str, gpu: str, prompt_tokens: int, row_tokens: int
    ) -> PlanSummary:
        from tandem.recipes.plan_run import plan_run
        from tandem.runs.planner.plan_text import plan_text

        planned = plan_run(parse_spec(spec), gpu=gpu, prompt_tokens=prompt_tokens, row_tokens=row_tokens)
        seconds = float(planned.as_json()["times"]["steps_s"])
        return PlanSummary.of(planned.fits, plan_text(planned), planned.peak_gib, seconds)


class ServerDesk:
    """The runs of the control server that this process is, for one key. All that it does goes through the server's own
    API with that key, so that scopes, projects, budgets and the audit log hold. Mirrors are read where they are."""

    def __init__(self, url: str, key: str, mirrors: Path) -> None:
        self._url, self._key, self._mirrors, self.spending = url, key, mirrors, Spending()

    def server(self) -> Tandem:
        return Tandem(self._url, self._key)

    def here(self) -> list[Row]:
        return []

    def place(self, run: str) -> Path:
        mirror = self._mirror(run)
        with self.server() as server:
            server.run(run).info()  # refuses a run that this key may not see
        return mirror

    def _mirror(self, run: str) -> Path:
        if not is_run_id(run):
            raise RunError(f"run = '{run[:60]}': must be the id of a run; list_runs says which there are")
        return self._mirrors / run

    def sight(self, run: str) -> Row:
        place = self._mirror(run)  # the server is asked below
        with self.server() as server:
            return look_remote(server.run(run), place)

    def explained(self, run: str) -> Row:
        place = self._mirror(run)
        with self.server() as server:
            return explain_remote(server.run(run), place)

    def targets(self) -> list[Row]:
        with self.server() as server:
            return [each.model_dump(mode="json") for each in server.targets()]

    def estimate(
        self, spec: Mapping[str, Any], target: str, gpu: str, prompt_tokens: int, row_tokens: int
    ) -> PlanSummary:
        with self.server() as server:
            target = target or server.targets()[0].name
            planned = server.plan(spec, target=target, gpu=gpu, prompt_tokens=prompt_tokens, row_tokens=row_tokens)
        if (best := planned.best) is None:
            why = "; ".join(each.why_not for each in planned.estimates) or planned.error
            raise RunError(f"target = '{target}': no estimate: {why[:500]}")
        return PlanSummary.of(best.fits, best.text, best.memory_gib, best.seconds)
