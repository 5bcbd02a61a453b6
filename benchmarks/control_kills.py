"""Real servers, agents and trainers that are killed with SIGKILL while runs are under way: is every run brought to its
end, once, to the bytes of a run that nothing happened to?

A control plane (on PostgreSQL, or on SQLite) has three targets: this machine, one over OpenSSH, a Slurm cluster. Short
runs, SFT and GRPO in turn, are under way on each. A seeded generator draws when, and what:

    control, postgres, slurmctld, slurmd, sshd     is killed, and started again after some seconds, as systemd would
    network        nothing passes between agents and control plane; or every connection breaks, and none is taken
    agent, guard, supervisor, trainer              the process of one run
    job            all processes of one run at once, as when a machine is gone

At the end each run must be `succeeded` with the digests of `tandem train` alone, its mirror must equal its directory
byte by byte, no two attempts of it may have trained at once, no process may be left. Exit code 1 if one of it fails.

python benchmarks/control_kills.py [--kills 200] [--database sqlite] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from common import children_of, note, table
from crew_kills import until
from kept_servers import Unit, kill
from run_kills import cases
from tandem.control.maintenance import doctor
from three_targets import TARGETS, ThreeTargets, alone, run_of

OF_A_RUN = {"agent": 3, "guard": 1, "supervisor": 1, "trainer": 2, "job": 1}
WEIGHTS = {"control": 4, "postgres": 3, "slurmctld": 2, "slurmd": 1, "slurmd 2": 1, "sshd": 2, "network": 3, **OF_A_RUN}
PHASES = ("waits", "starts", "trains", "ends")
END_S = 900.0


class Kills(ThreeTargets):
    """What can be killed of a control plane and its runs."""

    def __init__(self, home: Path, database: str, kinds: dict[str, dict[str, Any]], whole: dict[str, Any]) -> None:
        super().__init__(home, database, kinds, whole)
        slurm, self._over = self.slurm, threading.Event()
        self.units = {
            "slurmctld": Unit(slurm.start_controller, slurm.controller),
            "slurmd": Unit(lambda: slurm.start_node(1), slurm.processes[1]),
            "slurmd 2": Unit(lambda: slurm.start_node(2), slurm.processes[2]),
            "sshd": Unit(self.sshd.start, self.sshd.process),
            "control": Unit(self.spawn, self.process),
        }
        if self.postgres is not None:
            self.units["postgres"] = Unit(self.postgres.start, self.postgres.process)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def strike(self, rng: random.Random) -> tuple[str, list[str]] | None:
        """Kill one thing; return what, and what the runs were doing. None if it was not there."""
        known = [each for each in WEIGHTS if each in self.units or each == "network" or each in OF_A_RUN]
        victim = rng.choices(known, [WEIGHTS[each] for each in known])[0]
        phases = [self.phase(run) for run in self.live]
        pause_s, cut_s, one_child = rng.uniform(0.1, 5.0), rng.choice((2.0, 6.0, 15.0, 75.0)), rng.random() < 0.5
        if victim == "network":
            self.network.cut(cut_s, breaks=rng.random() < 0.5)
        elif victim == "postgres" and one_child and (children := children_of(self.units[victim].process.pid)):
            kill(rng.choice(children))
        elif victim in self.units:
            self.units[victim].kill(pause_s, children=victim == "sshd")
        else:
            theirs = {run: pids for run, found in self.processes_by_run().items() if (pids := found[victim])}
            if not theirs:
                return None
            run = rng.choice(sorted(theirs))
            phases = [self.phase(run)]
            for pid in theirs[run] if victim == "job" else theirs[run][:1]:
                kill(pid)
        return victim.partition(" ")[0], phases

    def _watch(self) -> None:
        """Look for runs that two attempts train at once."""
        told = set[str]()
        while not self._over.wait(0.3):
            jobs = {job for _, job, what in self.jobs() if what == "trainer"}
            several = {run for run, count in Counter(map(run_of, jobs)).items() if count > 1} - told
            for run in several:
                self.problem(f"{run}: two of {sorted(jobs)} train at once")
            told |= several

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        for unit in reversed(list(self.units.values())):
            unit.close()
        super().close()


def struck(kills: Kills, rng: random.Random, asked: argparse.Namespace) -> dict[str, Counter[str]]:
    """Keep runs under way and kill; wait for the end of all runs. Return what was struck, and what runs were doing."""
    told: dict[str, Counter[str]] = defaultdict(Counter)
    done, kinds = 0, list(kills.specs)
    give_up = time.monotonic() + END_S
    while done < asked.kills or kills.live:
        kills.look()
        if done < asked.kills:
            for target in TARGETS:
                if sum(kills.where[run] == target for run in kills.live) < asked.at_once:
                    kills.submit_one(target, kinds[len(kills.where) % len(kinds)])
        time.sleep(rng.uniform(0.0, 2 * asked.every))
        if done < asked.kills and (found := kills.strike(rng)):
            done, give_up = done + 1, time.monotonic() + END_S
            told[found[0]].update([*found[1], "times"])
            print(f"{done}: {found[0]}: {' '.join(found[1])}", file=sys.stderr, flush=True)
        if time.monotonic() > give_up:
            kills.problem(f"{END_S:g} s after the last kill: {kills.live}")
            return told
    if not until(lambda: not kills.processes(), 60):
        kills.problem(f"processes are left: {dict(kills.processes_by_run())}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--at-once", type=int, default=2, help="runs under way on each target")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two kills, in the mean")
    parser.add_argument("--steps", type=int, default=15, help="steps of a GRPO run; an SFT run has twice as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    asked = parser.parse_args()
    began, home = time.monotonic(), Path(tempfile.mkdtemp(prefix="control-kills-"))
    specs = {kind: spec for kind, spec in cases(home, asked.steps).items() if kind != "LoRA"}
    kills = Kills(home, asked.database, specs, alone(home, specs))
    try:
        told = struck(kills, random.Random(asked.seed), asked)
        for each in doctor(home / "data", kills.database):
            if not each.ok:
                kills.problem(f"doctor: {each.what}: {each.says}")
    finally:
        kills.close()
    rows = [[name, str(told[name]["times"]), *(str(told[name][phase]) for phase in PHASES)] for name in sorted(told)]
    table(["killed", "times", *(f"runs: {phase}" for phase in PHASES)], rows)
    several = ", ".join(f"{count} with {number}" for number, count in sorted(kills.attempts.items()))
    note(f"{asked.database}: {sum(each['times'] for each in told.values())} kills, {len(kills.where)} runs (attempts: "
         f"{several}), {len(kills.problems)} problems, must be 0; {time.monotonic() - began:.0f} s")  # fmt: skip
    if asked.keep or kills.problems:
        print(f"all logs are in {home}")
    else:
        shutil.rmtree(home)
    sys.exit(bool(kills.problems))


if __name__ == "__main__":
    main()
