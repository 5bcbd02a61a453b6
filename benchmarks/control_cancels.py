"""How long after `tandem cancel` does the last process of a run live?

Runs on this machine, over OpenSSH and on Slurm are cancelled while they begin, while they train, while their trainer
stands still (SIGSTOP) and cannot obey, and while their agent cannot reach the control plane, so that it is not told.
The clock starts before the command does, and stops when no process of the run is left: of those with the job's mark in
their environment, and of all that these have started. Exit code 1 if it takes longer than 10 s (Slurm: 30 s), a run
ends otherwise than `cancelled`, or a process comes back.

python benchmarks/control_cancels.py [--times 10] [--database postgresql]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from common import children_of, note, table
from crew_kills import alive, until
from run_kills import cases
from three_targets import TARGETS, ThreeTargets

MUST_S = {"local": 10.0, "ssh": 10.0, "slurm": 30.0}
WHILE = ("begins", "trains", "stands still", "is cut off")


def processes_of(plane: ThreeTargets, run: str) -> set[int]:
    """Return the pids of a run: those that carry its mark, and what they have started."""
    found, new = set[int](), set(plane.processes_by_run()[run]["job"])
    while new := new - found:
        found |= new
        new = {child for pid in new for child in children_of(pid)}
    return found


def cancelled(plane: ThreeTargets, target: str, kind: str, when: str) -> float:
    """Cancel a run; return after how many seconds its last process was gone."""
    run = plane.submit_one(target, kind)
    if when == "begins":
        there = until(lambda: plane.processes_by_run()[run]["agent"], 120)
    else:
        there = until(lambda: plane.steps(run) > 1, 120)
    if not there:
        plane.problem(f"{run} on {target}: has not begun")
    if when == "stands still":
        for pid in plane.processes_by_run()[run]["trainer"]:
            os.kill(pid, signal.SIGSTOP)
    if when == "is cut off":
        plane.network.cut(600, breaks=False)
    took_s = seconds_until_gone(plane, run)
    print(f"{target}, {when}: {took_s:.1f} s", file=sys.stderr, flush=True)
    return took_s


def seconds_until_gone(plane: ThreeTargets, run: str) -> float:
    """Cancel a run; return after how many seconds its last process was gone. After that, let the network pass."""
    target, pids = plane.where[run], processes_of(plane, run)
    del plane.live[run]
    command = [sys.executable, "-P", "-m", "tandem", "cancel", run]
    began = time.monotonic()
    asked = subprocess.Popen(command, env={**os.environ, "TANDEM_CONTROL": str(plane.home / "data")},
                             stdout=subprocess.DEVNULL)  # fmt: skip
    by = began + 4 * MUST_S[target]
    while (pids := {pid for pid in pids if alive(pid)} | processes_of(plane, run)) and time.monotonic() < by:
        time.sleep(0.02)
    took_s = time.monotonic() - began
    plane.network.cut(0, breaks=False)
    if pids:
        plane.problem(f"{run} on {target}: after {took_s:.0f} s there are {pids}")
    if asked.wait() or not until(lambda: plane.state(run) == "cancelled", 60):
        plane.problem(f"{run} on {target}: `tandem cancel` ended with {asked.wait()}, the run is {plane.state(run)}")
    time.sleep(1.5)
    if back := processes_of(plane, run):
        plane.problem(f"{run} on {target}: {back} came after all had gone")
    if [each.state for each in plane.client.run(run).attempts()] != ["closed"]:
        plane.problem(f"{run} on {target}: {plane.client.run(run).attempts()}")
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="cancels on each target while it trains; else a fifth")
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    asked = parser.parse_args()
    began, home = time.monotonic(), Path(tempfile.mkdtemp(prefix="control-cancels-"))
    specs = {kind: spec for kind, spec in cases(home, 2000).items() if kind != "LoRA"}
    took_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    plane = ThreeTargets(home, asked.database, specs, {})
    try:
        for number in range(asked.times):
            for when in WHILE if number % 5 == 0 else ("trains",):
                for target in TARGETS:
                    kind = list(specs)[number % len(specs)]
                    took_s[when, target].append(cancelled(plane, target, kind, when))
    finally:
        plane.close()
    rows: list[list[str]] = []
    for (when, target), found in took_s.items():
        figures = (f"{each:.1f} s" for each in (min(found), statistics.median(found), max(found)))
        rows.append([target, when, str(len(found)), *figures, f"≤ {MUST_S[target]:g} s"])
        if max(found) > MUST_S[target]:
            plane.problem(f"{target}, while it {when}: {max(found):.1f} s")
    table(["target", "the run", "cancels", "least", "median", "most", "must be"], rows)
    note(f"{asked.database}, load {os.getloadavg()[0]:.0f}: from the command to the run's last process, "
         f"{len(plane.problems)} problems, must be 0; {time.monotonic() - began:.0f} s")  # fmt: skip
    if plane.problems:
        print(f"all logs are in {home}")
    else:
        shutil.rmtree(home)
    sys.exit(bool(plane.problems))


if __name__ == "__main__":
    main()
