"""A control plane with a target on this machine, one over OpenSSH and one on Slurm, and runs on each: where their
processes are, and whether a run that has ended is whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from kept_servers import Network, kill
from run_kills import digest_or_error

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "providers"))

from places import Postgres, Slurm, Sshd
from whole_way import Control, not_mirrored

from tandem import digest_run
from tandem.client import Tandem

TARGETS = ("local", "ssh", "slurm")
ENDED = ("succeeded", "failed", "stopped", "cancelled")
PATIENCE_S, RETRIES = 120.0, 100


class Plane(Control):
    """A control plane whose agents reach it through a network that can be cut, and the processes of its runs."""

    def __init__(self, home: Path, targets: str, *options: str) -> None:
        super().__init__(home, targets, *options)
        self.client = Tandem(f"http://127.0.0.1:{self.port}", self.token, patience_s=PATIENCE_S)

    def spawn(self) -> subprocess.Popen[bytes]:
        if not hasattr(self, "network"):
            self.network = Network(self.port)
            self._options = (*self._options, "--url", f"http://127.0.0.1:{self.network.port}")
        return super().spawn()

    def processes_by_run(self) -> dict[str, dict[str, list[int]]]:
        """Return the pids of each run's processes by what they are; all of them are `job`."""
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for pid, job, what in self.jobs():
            found[run_of(job)][what].append(pid)
            found[run_of(job)]["job"].append(pid)
        return found

    def jobs(self) -> Iterator[tuple[int, str, str]]:
        """Yield each process of a job: its pid, the job's name, and what it is."""
        for pid in self.processes():
            with suppress(OSError, StopIteration):
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                job = next(each for each in environ if each.startswith("TANDEM_JOB="))
                yield pid, job.rpartition("/")[2], what_of(words)


class ThreeTargets(Plane):
    """The control plane, the servers that its targets need, and the runs that it has."""

    def __init__(self, home: Path, database: str, specs: dict[str, dict[str, Any]], whole: dict[str, Any]) -> None:
        """`specs` and `whole`: by the kind of a run, what is trained and the digests that it must have."""
        self.specs, self.whole = specs, whole
        self.where, self.kind, self.live = dict[str, str](), dict[str, str](), dict[str, str]()
        self.problems: list[str] = []
        self.attempts: Counter[int] = Counter()
        (home / "sshd").mkdir()
        self.sshd, self.slurm = Sshd(home / "sshd"), Slurm()
        self.postgres = Postgres() if database == "postgresql" else None
        self.database = "" if self.postgres is None else self.postgres.url
        settings = {"local": "", "ssh": "".join(f"{name} = {value!r}\n" for name, value in self.sshd.login.items()),
                    "slurm": f'conf = "{self.slurm.conf}"\n'}  # fmt: skip
        targets = "".join(
            f'[targets.{name}]\nkind = "{name}"\ndirectory = "{home}/{name}"\ntandem = "{home}/tandem"\n{more}'
            for name, more in settings.items()
        )
        super().__init__(home, targets, "--database", self.database)

    def directory(self, run: str) -> Path:
        return self.home / self.where[run] / "runs" / run

    def submit_one(self, target: str, kind: str) -> str:
        name = f"{kind.lower()}-{len(self.where)}"
        run = self.client.submit(self.specs[kind], target=target, name=name, retries=RETRIES).id
        self.where[run], self.kind[run], self.live[run] = target, kind, "queued"
        return run

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

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            kill(pid)
        self.sshd.kill()
        self.slurm.kill()
        if self.postgres is not None:
            self.postgres.close()


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
        (home / f"{kind}.toml").write_text(tomli_w.dumps(spec))
        command = [sys.executable, "-P", "-m", "tandem", "train", f"{kind}.toml", "--run-dir", f"alone-{kind}"]
        subprocess.run(command, cwd=home, check=True, capture_output=True)
        found[kind] = digest_run(home / f"alone-{kind}")
    return found
