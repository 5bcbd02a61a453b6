"""An older release of the control plane, with runs under way, is upgraded to this one: does a run notice?

The older release is a commit of this repository whose tables are older: its server, and its `tandem` on this machine,
on an SSH box and on Slurm. On each of the three one run trains all the time, one ends while no server is there, and one
is submitted in the last moment. The server is ended, the database copied as docs/control.md says, and upgraded by
`tandem control upgrade` of this release, whose server goes on. Each machine, which still has the older release, is then
given two further runs, of which one is cancelled, and a last one when it has this release, too.

Each run must succeed in one attempt, in the same processes, with the digests of `tandem train` alone and a mirror of
the same bytes, and be one row of usage. At the end the older release must refuse the database, and leave it as it is;
the copy must be good for it. Exit code 1 if one of it fails.

python benchmarks/control_upgrade.py [--old COMMIT] [--database sqlite]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import tandem
from common import note, table
from control_cancels import cancelled
from crew_kills import until
from run_kills import cases
from tandem.control.maintenance import doctor
from three_targets import TARGETS, ThreeTargets, alone

SRC = Path(tandem.__file__).parents[1]
MIGRATIONS = "src/tandem/control/migrations/versions"
WAITS = """
import time
from pathlib import Path


class Wait:
    def on_step(self, step):
        {word} Path({file!r}).exists():
            time.sleep(4)
"""
"""A callback, and not an environment that waits: which answers are made together must not depend on it."""
LONG, HELD, SHORT = "long", "held", "short"
END_S = 900.0


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=SRC.parent, check=True, stdout=subprocess.PIPE).stdout


def release_before() -> str:
    """Return the last commit without the newest migration."""
    newest = max((SRC.parent / MIGRATIONS).glob("r[0-9]*.py"))
    [came] = git("log", "--diff-filter=A", "--format=%H", "--", str(newest)).decode().split()[-1:]
    return git("rev-parse", f"{came}^").decode().strip()


def use(src: Path) -> None:
    """Let every `tandem` that is started from now on be the one in this folder."""
    os.environ["PYTHONPATH"] = str(src)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-m", "tandem", *words], capture_output=True, text=True, check=False)


def kinds_of(home: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Return the specs. While there is a file of its name, `held` waits, and `long` takes 4 s a step."""
    short, kinds = cases(home, 3), dict[str, dict[str, Any]]()
    for kind, word, spec in ((LONG, "if", cases(home, steps)["GRPO"]), (HELD, "while", short["GRPO"])):
        (home / f"{kind}.py").write_text(WAITS.format(word=word, file=str(home / kind)))
        kinds[kind] = {**spec, "callbacks": [f"{home / kind}.py:Wait"]}
    return {**kinds, SHORT: short["SFT"]}


class CommandLine(ThreeTargets):
    """It is given runs by the command line of the release in use, whose specs have the fields that this one knows."""

    def submit_one(self, target: str, kind: str) -> str:
        name = f"{kind}-{len(self.where)}"
        place = ("--target", target, "--name", name, "--retries", "3", "--yes", "--detach")
        os.environ["TANDEM_CONTROL"] = str(self.home / "data")
        told = command("submit", str(self.home / "alone-old" / f"{kind}.toml"), *place)
        found = re.search(r"run_[a-z2-7]{26}", told.stdout)
        assert found, told
        self.where[run := found.group()], self.kind[run], self.live[run] = target, kind, "queued"
        return run


class Upgrade:
    """The older release and this one, on one database, and what was seen."""

    def __init__(self, home: Path, database: str, asked: argparse.Namespace) -> None:
        self.home, self.old = home, home / "old" / "src"
        with tarfile.open(fileobj=BytesIO(git("archive", asked.old, "src"))) as archive:
            archive.extractall(home / "old", filter="data")
        self.seen: dict[str, tuple[str, str]] = {}
        """By what: what must be, and what was found."""
        self.specs = kinds_of(home, asked.steps)
        use(self.old)
        whole = self._alone("alone-old")
        self.files = [home / kind for kind in (LONG, HELD)]
        for each in self.files:
            each.touch()
        self.plane = CommandLine(home, database, self.specs, whole)

    def run(self) -> None:
        plane = self.plane
        long, held = ([plane.submit_one(target, kind) for target in TARGETS] for kind in (LONG, HELD))
        if not until(lambda: all(plane.steps(run) for run in long) and all(self._trainer(run) for run in held), 240):
            plane.problem("the runs did not begin")
        trainers = {run: self._trainer(run) for run in long}
        late = [plane.submit_one(target, SHORT) for target in TARGETS]
        ended_at = time.monotonic()
        plane.process.send_signal(signal.SIGTERM)
        plane.process.wait(60)
        begun = sum(bool(self._trainer(run)) for run in late)
        self.files[1].unlink()
        if not until(lambda: all(self._has_trained(run) for run in held), 240):
            plane.problem("the runs that should end while no server is there do not end")
        self._copy()
        use(SRC)
        told = command("control", "upgrade", *self._where())
        plane.start()
        away_s = time.monotonic() - ended_at
        time.sleep(3)
        goes_on = [run for run in long if plane.phase(run) == "trains" and self._trainer(run) == trainers[run]]
        self._must("tables", "upgraded", told.stdout.strip(), good=told.stdout.startswith("upgraded from revision"))
        self._must("seconds without a server", "", f"{away_s:.0f}")
        self._must("runs that train before, meanwhile and after, in one process", "3", str(len(goes_on)))
        self._must("runs that ended meanwhile", "3", str(len(held)))
        self._must("runs submitted right before that began to train after it", "", str(len(late) - begun))
        self.files[0].unlink()
        use(self.old)
        took_s = {target: cancelled(plane, target, LONG, "trains") for target in TARGETS}
        found = ", ".join(f"{seconds:.0f} s" for seconds in took_s.values())
        self._must("runs of machines with the older release that were cancelled, gone after", "", found)
        more = [plane.submit_one(target, SHORT) for target in TARGETS]
        self._wait()
        self._must("runs of machines with the older release", "3 succeeded", self._succeeded(more))
        use(SRC)
        plane.put_command()
        self.specs = {SHORT: self.specs[SHORT]}
        plane.whole = self._alone("alone-new")
        more = [plane.submit_one(target, SHORT) for target in TARGETS]
        self._wait()
        self._must("runs of upgraded machines", "3 succeeded", self._succeeded(more))
        self._count()

    def downgrade(self) -> None:
        """Start the older release on the upgraded database, then on the copy of its own."""
        plane = self.plane
        plane.process.send_signal(signal.SIGTERM)
        plane.process.wait(60)
        before = self._rows()
        use(self.old)
        serve = ("control", "serve", "--port", "0", "--targets", str(self.home / "targets.toml"), *self._where())
        told = [command(*serve), command("control", "upgrade", *self._where())]
        refused = [each for each in told if each.returncode and "this Tandem knows revisions up to" in each.stderr]
        print(told[0].stderr, file=sys.stderr)
        self._must("`serve` and `upgrade` of the older release on it", "2 refused", f"{len(refused)} refused")
        self._must("... which they changed", "no", "no" if self._rows() == before else "yes")
        told = self._doctor_of_the_copy()
        self._must("the copy, by the older release's doctor", "good", "good" if told.returncode == 0 else told.stdout)
        use(SRC)

    # --- what an operator does

    def _where(self) -> tuple[str, ...]:
        return ("--data-dir", str(self.home / "data"), "--database", self.plane.database)

    def _copy(self) -> None:
        """Copy the database, by the older release."""
        if self.plane.postgres is None:
            told = command("control", "backup", str(self.home / "copy"), "--data-dir", str(self.home / "data"))
            if told.returncode:
                self.plane.problem(told.stderr)
        else:
            (self.home / "copy.sql").write_text(self._dump())
            shutil.copytree(self.home / "data", self.home / "copy")

    def _doctor_of_the_copy(self) -> subprocess.CompletedProcess[str]:
        if self.plane.postgres is None:
            command("control", "restore", str(self.home / "copy"), "--data-dir", str(self.home / "back"))
            return command("control", "doctor", "--data-dir", str(self.home / "back"))
        url = self._url()
        subprocess.run(["psql", "-q", url, "-c", "create database back"], check=True)
        back = f"{url.rpartition('/')[0]}/back"
        with (self.home / "copy.sql").open() as dump:
            subprocess.run(["psql", "-q", back], stdin=dump, stdout=subprocess.DEVNULL, check=True)
        database = f"{self.plane.database.rpartition('/')[0]}/back"
        return command("control", "doctor", "--data-dir", str(self.home / "copy"), "--database", database)

    def _rows(self) -> str:
        if self.plane.postgres is not None:
            random = ("\\restrict", "\\unrestrict")  # a new word in each dump
            return "\n".join(line for line in self._dump().splitlines() if not line.startswith(random))
        with closing(sqlite3.connect(self.home / "data" / "control.sqlite3")) as connection:
            return "\n".join(connection.iterdump())

    def _dump(self) -> str:
        return subprocess.run(["pg_dump", self._url()], capture_output=True, text=True, check=True).stdout

    def _url(self) -> str:
        return self.plane.database.replace("+psycopg", "")

    # --- what is seen

    def _alone(self, name: str) -> dict[str, dict[str, str]]:
        (self.home / name).mkdir()
        return alone(self.home / name, self.specs)

    def _trainer(self, run: str) -> list[int]:
        return self.plane.processes_by_run()[run]["trainer"]

    def _has_trained(self, run: str) -> bool:
        return any(self.home.glob(f"*/tandem-*{run}-1/trainer.code"))

    def _wait(self) -> None:
        give_up = time.monotonic() + END_S
        while self.plane.live and time.monotonic() < give_up:
            self.plane.look()
            time.sleep(0.5)
        if self.plane.live:
            self.plane.problem(f"after {END_S:g} s there are {self.plane.live}")

    def _succeeded(self, runs: list[str]) -> str:
        return f"{sum(self.plane.state(run) == 'succeeded' for run in runs)} succeeded"

    def _count(self) -> None:
        plane = self.plane
        states = Counter(plane.state(run) for run in plane.where)
        self._must("runs that succeeded; others were cancelled", "15", str(states["succeeded"]))
        self._must("runs with further attempts", "0", str(sum(plane.attempts.values()) - plane.attempts[1]))
        rows = Counter(row.run for row in plane.client.usage())
        self._must("rows of usage, one of each run", str(len(plane.where)), str(len(rows)))
        if set(rows.values()) != {1}:
            plane.problem(f"rows of usage: {rows}")
        for each in doctor(self.home / "data", plane.database):
            if not each.ok:
                plane.problem(f"doctor: {each.what}: {each.says}")

    def _must(self, what: str, must: str, found: str, *, good: bool | None = None) -> None:
        self.seen[what] = must, found
        if not (found == must or not must if good is None else good):
            self.plane.problem(f"{what}: {found}, must be {must}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default="", help="commit of the older release; default: before the newest migration")
    parser.add_argument("--database", choices=("postgresql", "sqlite"), help="default: both, one after the other")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run that trains all the time")
    asked = parser.parse_args()
    asked.old = asked.old or release_before()
    began, problems, seen = time.monotonic(), 0, dict[str, dict[str, tuple[str, str]]]()
    for database in [asked.database] if asked.database else ["postgresql", "sqlite"]:
        home = Path(tempfile.mkdtemp(prefix="control-upgrade-"))
        upgrade = Upgrade(home, database, asked)
        try:
            upgrade.run()
            upgrade.downgrade()
        finally:
            upgrade.plane.close()
        seen[database], problems = upgrade.seen, problems + len(upgrade.plane.problems)
        if upgrade.plane.problems:
            print(f"all logs are in {home}")
        else:
            shutil.rmtree(home)
    rows = {what: [what, must, *(each[what][1] for each in seen.values())] for each in seen.values()
            for what, (must, _) in each.items()}  # fmt: skip
    table(["what", "must be", *seen], list(rows.values()))
    note(f"from {asked.old[:8]}, load {os.getloadavg()[0]:.0f}: {problems} problems, must be 0; "
         f"{time.monotonic() - began:.0f} s")  # fmt: skip
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
