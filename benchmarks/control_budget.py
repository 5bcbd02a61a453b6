"""Runs that would train for ever, each with a limit to its costs: is it ever exceeded by more than one poll's price?

A control plane, agents and trainers are real processes. A target costs a dollar a second: a limit in dollars is one in
seconds. Before a run's limit is reached, something is done to it, and to the control plane:

    nothing                  the trainer is asked to save and end, and does
    trainer stands still     and its supervisor: neither saves nor ends (SIGSTOP)
    agent killed             its guard starts it again
    agent stands still       so the provider must end the job
    agent and guard killed   the trainer goes on alone
    job killed               early: a further attempt goes on with what is left

    answers                  the control plane does
    killed                   it is away for 5 to 40 seconds
    cut off                  connections between it and the agents break, or hang, for as long

What a run cost is measured twice: by the rows of usage, and by the seconds in which processes of its jobs lived, from
the claim on. Exit code 1 if one is over.

python benchmarks/control_budget.py [--runs 100] [--at-once 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import note, table
from kept_servers import Unit, kill
from three_targets import ENDED, Plane, run_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))

from whole_way import spec_of

from tandem.control.decide import POLL_MS

FATES = {
    "nothing": 2, "trainer stands still": 2, "agent killed": 2, "agent stands still": 2, "agent and guard killed": 2,
    "job killed": 1,
}  # fmt: skip
"""And how often."""
TARGETS = ("here", "there")
"""This machine, twice: a target gives a CPU to each of its runs."""
PLANES = ("answers", "killed", "cut off")
LOOK_S = 0.2
END_S = 300.0


class Budgets(Plane):
    def __init__(self, home: Path) -> None:
        self._over = threading.Event()
        self.seen: dict[str, float] = {}
        """By job: when a process of it was last seen."""
        rest = f'kind = "local"\ntandem = "{home}/tandem"\nusd_per_hour = 3600\n'
        super().__init__(home, "".join(f'[targets.{name}]\ndirectory = "{home}/{name}"\n{rest}' for name in TARGETS))
        self.unit = Unit(self.spawn, self.process)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.time()
            self.seen |= {job: now for _, job, _ in self.jobs()}

    def strike(self, run: str, fate: str) -> bool:
        """Return whether there was what is to be struck."""
        found = self.processes_by_run()[run]
        match fate:
            case "trainer stands still":
                victims, number = [*found["supervisor"], *found["trainer"]], signal.SIGSTOP
            case "agent stands still":
                victims, number = found["agent"], signal.SIGSTOP
            case "agent killed":
                victims, number = found["agent"], signal.SIGKILL
            case "agent and guard killed":
                victims, number = [*found["guard"], *found["agent"]], signal.SIGKILL
            case _:
                victims, number = found["job"], signal.SIGKILL
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(victims)

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        self.client.close()
        self.unit.close()
        for pid in self.processes():
            kill(pid)


def round_of_runs(budgets: Budgets, rng: random.Random, count: int, plane: str) -> list[dict[str, Any]]:
    """Submit runs, do to them and to the control plane what is drawn, and wait for their end."""
    runs: dict[str, dict[str, Any]] = {}
    for number in range(count):
        (fate,) = rng.choices(list(FATES), list(FATES.values()))
        limit_s = rng.uniform(95, 110) if fate == "job killed" else rng.uniform(28, 55)
        spec = tomllib.loads(spec_of(budgets.home, 10**6, checkpoint={"every": 20}))
        run = budgets.client.submit(spec, target=TARGETS[number % 2], max_cost_usd=limit_s).id
        before_s = rng.uniform(80, 90) if fate == "job killed" else rng.uniform(3, 16)
        runs[run] = {"run": run, "fate": fate, "plane": plane, "limit": limit_s, "before": before_s, "claimed": 0.0}
    plane_before_s, away_s, breaks = rng.uniform(1, 20), rng.uniform(5, 40), rng.random() < 0.5
    plane_done, give_up = plane == "answers", time.monotonic() + END_S
    while time.monotonic() < give_up:
        time.sleep(0.1)
        away = plane_done and plane == "killed" and budgets.unit.process.poll() is not None
        for run, each in runs.items() if not away else ():
            if not each["claimed"] and (attempts := budgets.client.run(run).attempts()):
                each["claimed"] = attempts[0].claimed_at / 1000
        known = [each for each in runs.values() if each["claimed"]]
        for each in known:
            ends = each["claimed"] + each["limit"]
            if not each.get("struck") and time.time() > ends - each["before"]:
                each["struck"] = each["fate"] == "nothing" or budgets.strike(each["run"], each["fate"]) or "not there"
            if not plane_done and time.time() > ends - plane_before_s:
                plane_done = True
                if plane == "killed":
                    budgets.unit.kill(away_s)
                else:
                    budgets.network.cut(away_s, breaks=breaks)
        if plane_done and not away and all(budgets.client.run(run).info().state in ENDED for run in runs):
            break
    time.sleep(1.0)
    return [outcome(budgets, each) for each in runs.values()]


def outcome(budgets: Budgets, each: dict[str, Any]) -> dict[str, Any]:
    run, info = each["run"], budgets.client.run(each["run"]).info()
    usage = [row for row in budgets.client.usage() if row.run == run]
    attempts = budgets.client.run(run).attempts()
    real_s = 0.0
    for attempt in attempts:
        job = next((job for job in budgets.seen if run_of(job) == run and job.endswith(f"-{attempt.n}")), "")
        if job and attempt.claimed_at:
            real_s += max(0.0, budgets.seen[job] - attempt.claimed_at / 1000)
    rows = budgets.mirror(run) / "metrics.jsonl"
    steps = rows.read_bytes().count(b"\n") if rows.exists() else 0
    told = {"state": info.state, "why": info.why, "steps": steps, "attempts": len(attempts)}
    over = {"by rows": sum(row.usd for row in usage) - each["limit"], "by processes": real_s - each["limit"]}
    print(f"   {each['fate']}, {each['plane']}: {told} {over}", file=sys.stderr, flush=True)
    return {**each, **told, **over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began, rng, home = time.monotonic(), random.Random(asked.seed), Path(tempfile.mkdtemp(prefix="control-budget-"))
    budgets, found = Budgets(home), list[dict[str, Any]]()
    try:
        while len(found) < asked.runs:
            plane = PLANES[len(found) // asked.at_once % len(PLANES)]
            found += round_of_runs(budgets, rng, min(asked.at_once, asked.runs - len(found)), plane)
    finally:
        budgets.close()
    poll = POLL_MS / 1000
    wrong = [each for each in found if each["state"] != "stopped" or max(each["by rows"], each["by processes"]) > poll]
    rows: list[list[str]] = []
    for fate in FATES:
        for plane in PLANES:
            these = [each for each in found if (each["fate"], each["plane"]) == (fate, plane)]
            if these:
                most = (f"{max(each[how] for each in these):+.1f}" for how in ("by rows", "by processes"))
                rows.append([fate, plane, str(len(these)), *most, str(sum(each["steps"] > 0 for each in these))])
    table(["run", "control plane", "runs", "most over by rows ($)", "by processes ($)", "had trained"], rows)
    note(f"{len(found)} runs at $1 a second; {len(wrong)} over by more than a poll's ${poll:g} or with another end, "
         f"must be 0; {time.monotonic() - began:.0f} s")  # fmt: skip
    for each in wrong:
        print(each)
    if not wrong:
        shutil.rmtree(home)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
