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
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import children_of, note, table
from crew_kills import until
from kept_servers import Network, Unit, kill
from run_kills import cases, digest_or_error

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "providers"))

from places import Postgres, Slurm, Sshd
from whole_way import Control, not_mirrored

from tandem import digest_run
from tandem.client import Tandem
from tandem.control.maintenance import doctor
from tandem.spec.load import parse_spec, to_toml

TARGETS = ("local", "ssh", "slurm")
OF_A_RUN = {"agent": 3, "guard": 1, "supervisor": 1, "trainer": 2, "job": 1}
WEIGHTS = {"control": 4, "postgres": 3, "slurmctld": 2, "slurmd": 1, "slurmd 2": 1, "sshd": 2, "network": 3, **OF_A_RUN}
ENDED = ("succeeded", "failed", "stopped", "cancelled")
PHASES = ("waits", "starts", "trains", "ends")
PATIENCE_S, END_S, RETRIES = 120.0, 900.0, 100


class Kills(Control):
    """A control plane with three targets, what can be killed of it, and the runs that it was given."""

    def __init__(self, home: Path, database: str, kinds: dict[str, dict[str, Any]], whole: dict[str, Any]) -> None:
        self.specs, self.whole, self.where, self.kind = kinds, whole, dict[str, str](), dict[str, str]()
        self.live: dict[str, str] = {}
        self.problems: list[str] = []
        self.attempts: Counter[int] = Counter()
        self._ending = ExitStack()
        self._over = threading.Event()
        (home / "sshd").mkdir()
        sshd, self.slurm = Sshd(home / "sshd"), (slurm := Slurm())
        settings = {"local": "", "ssh": "".join(f"{name} = {value!r}\n" for name, value in sshd.login.items()),
                    "slurm": f'conf = "{slurm.conf}"\n'}  # fmt: skip
        targets = "".join(
            f'[targets.{name}]\nkind = "{name}"\ndirectory = "{home}/{name}"\ntandem = "{home}/tandem"\n{more}'
            for name, more in settings.items()
        )

        self.units = {
            "slurmctld": Unit(slurm.start_controller, slurm.controller),
            "slurmd": Unit(lambda: slurm.start_node(1), slurm.processes[1]),
            "slurmd 2": Unit(lambda: slurm.start_node(2), slurm.processes[2]),
            "sshd": Unit(sshd.start, sshd.process),
        }
        self.database = ""
        if database == "postgresql":
            server = Postgres()
            self.units["postgres"], self.database = Unit(server.start, server.process), server.url
            self._ending.callback(shutil.rmtree, server.place, ignore_errors=True)
        super().__init__(home, targets, "--database", self.database)
        self.units["control"] = Unit(self.spawn, self.process)
        self.client = Tandem(f"http://127.0.0.1:{self.port}", self.token, patience_s=PATIENCE_S)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def spawn(self) -> subprocess.Popen[bytes]:
        if not hasattr(self, "network"):
            self.network = Network(self.port)
            self._options = (*self._options, "--url", f"http://127.0.0.1:{self.network.port}")
        return super().spawn()

    def directory(self, run: str) -> Path:
        return self.home / self.where[run] / "runs" / run

    def submit_one(self, target: str, kind: str) -> None:
        name = f"{kind.lower()}-{len(self.where)}"
        run = self.client.submit(self.specs[kind], target=target, name=name, retries=RETRIES).id
        self.where[run], self.kind[run], self.live[run] = target, kind, "queued"

    def phase(self, run: str) -> str:
        """What a run is doing."""
        steps = self.steps(run)
        if not steps:
            return "starts" if self.live.get(run) == "running" else "waits"
        return "ends" if (self.directory(run) / "export").exists() else "trains"

    def look(self) -> None:
        """Ask how the runs are, and check those that have ended."""
        known = {each.id: each.state for each in self.client.runs(most=10_000)}
        for run in [run for run in self.where if run not in known]:
            self.problem(f"{run} is lost")
        ended = [run for run in self.live if known.get(run) in ENDED]
        self.live = {run: known[run] for run in self.where if known.get(run, ENDED[0]) not in ENDED}
        for run in ended:
            self.check(run, known[run])
        for run in known.keys() - self.where:
            self.problem(f"{run} was submitted twice")

    def check(self, run: str, state: str) -> None:
        """Check a run that has ended."""
        name = f"{run} ({self.kind[run]} on {self.where[run]})"
        attempts = sorted(self.client.run(run).attempts(), key=lambda each: each.n)
        self.attempts[len(attempts)] += 1
        whys = "; ".join(each.why for each in attempts)
        took_s = (attempts[-1].closed_at - attempts[0].at) / 1000
        print(f"   {name}: {state} after {took_s:.0f} s: {whys}", file=sys.stderr, flush=True)
        if state != "succeeded":
            return self.problem(f"{name}: {state}: {whys}")
        for one, other in pairwise(attempts):
            if other.claimed_at and other.claimed_at < (one.ended_at or one.closed_at):
                self.problem(f"{name}: attempt {other.n} began before {one.n} had ended")
        if (digest := digest_or_error(self.directory(run))) != self.whole[self.kind[run]]:
            self.problem(f"{name}: {digest} instead of {self.whole[self.kind[run]]}: {whys}")
        if differ := not_mirrored(self, run):
            self.problem(f"{name}: not mirrored: {differ}: {whys}")
        last = max(self.home.glob(f"*/tandem-*{run}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        if (last / "trainer.log").read_bytes() != (self.mirror(run) / "console.txt").read_bytes():
            self.problem(f"{name}: console.txt is not what attempt {attempts[-1].n} printed")
        for bulky in ("checkpoints", "export"):
            shutil.rmtree(self.directory(run) / bulky, ignore_errors=True)

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

    def processes_by_run(self) -> dict[str, dict[str, list[int]]]:
        """Return the pids of each run's processes by what they are; all of them are `job`."""
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for pid, job, what in self._jobs():
            found[run_of(job)][what].append(pid)
            found[run_of(job)]["job"].append(pid)
        return found

    def _jobs(self) -> Iterator[tuple[int, str, str]]:
        """Yield each process of a job: its pid, the job's name, and what it is."""
        for pid in self.processes():
            with suppress(OSError, StopIteration):
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                job = next(each for each in environ if each.startswith("TANDEM_JOB="))
                yield pid, job.rpartition("/")[2], what_of(words)

    def _watch(self) -> None:
        """Look for runs that two attempts train at once."""
        told = set[str]()
        while not self._over.wait(0.3):
            jobs = {job for _, job, what in self._jobs() if what == "trainer"}
            several = {run for run, count in Counter(map(run_of, jobs)).items() if count > 1} - told
            for run in several:
                self.problem(f"{run}: two of {sorted(jobs)} train at once")
            told |= several

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        self.client.close()
        for unit in reversed(list(self.units.values())):
            unit.close()
        for pid in self.processes():
            kill(pid)
        self.slurm.kill()
        self._ending.close()


def run_of(job: str) -> str:
    return job.rpartition("-")[0].rpartition("-")[2]


def what_of(words: list[str]) -> str:
    """Return what a process of a job is, by its command line."""
    if "python" not in words[0] or any(word.endswith(("keep.py", "leash.py")) for word in words):
        return "other"
    if "agent" in words:
        return "agent" if "--once" in words else "guard"
    if {"train", "resume"} & set(words):
        return "supervisor" if "--supervise" in words else "trainer"
    return "other"


def alone(home: Path, specs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the digests of each kind of run as the command alone makes it."""
    found: dict[str, dict[str, str]] = {}
    for kind, spec in specs.items():
        (home / f"{kind}.toml").write_text(to_toml(parse_spec(spec)))
        command = [sys.executable, "-P", "-m", "tandem", "train", f"{kind}.toml", "--run-dir", f"alone-{kind}"]
        subprocess.run(command, cwd=home, check=True, capture_output=True)
        found[kind] = digest_run(home / f"alone-{kind}")
    return found


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
