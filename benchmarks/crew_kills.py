"""Runs of several ranks of which one is killed or stopped: does every process end, by name and in time, and does the
run go on to the bytes of a run that nothing happened to?

A trial starts or resumes a run, waits for a random moment of its life (start, step, save, end), and sends SIGKILL or
SIGSTOP to one rank. Then:

    another rank than 0    rank 0 must end with RankLost, which names it; a stopped one must be gone, too
    rank 0, killed         the others must be gone
    rank 0, stopped        the others must be gone, and say in their logs that rank 0 is silent; it is then killed here

all within `parallel.deadline_s` + 10 s, with no process left. Exit code 1 if one of it fails.

python benchmarks/crew_kills.py [--kills 40] [--ranks 2] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import descendants, note, table
from run_kills import attempt, cases, digest_or_error, forked, newest, steps_of

DEADLINE_S, GRACE_S, SETUP_S = 15.0, 10.0, 300.0
IN_A_RUN = 6
"""Kills of one run, before it may end."""


@dataclass
class Kill:
    rank: int
    how: signal.Signals
    moment: str
    seconds: float = 0.0
    lost_steps: int = 0


@dataclass
class Told:
    kills: list[Kill] = field(default_factory=list[Kill])
    runs: int = 0
    problems: list[str] = field(default_factory=list[str])

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, file=sys.stderr, flush=True)


class Attempt:
    """A process that works on a run, and the processes of its other ranks."""

    def __init__(self, spec: dict[str, Any], run_dir: Path, log: Path) -> None:
        self._run_dir, self._log = run_dir, log
        self._logged = log.stat().st_size if log.exists() else 0
        self._events = _size(run_dir / "events.jsonl")
        self.pid = forked(lambda: attempt(spec, run_dir), log)
        self.code: int | None = None

    def over(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = status
        return self.code is not None

    def followers(self) -> list[int]:
        """The processes of ranks 1, 2, and so on, as far as they have started."""
        found = {int(rank): pid for pid in descendants(self.pid) if (rank := environment_of(pid).get("RANK"))}
        return [found[rank] for rank in sorted(found)]

    def moment(self) -> str:
        """What it is doing."""
        told = self._stages()
        if not {"sft", "preference"} & set(told):
            return "start"
        if {"done"} & set(told) or (self._run_dir / "export").exists():
            return "end"
        return "save" if any((self._run_dir / "checkpoints").glob(".step-*")) else "step"

    def trains(self) -> bool:
        return self.moment() != "start"

    def said(self) -> str:
        with self._log.open(errors="replace") as file:
            file.seek(self._logged)
            return file.read()

    def _stages(self) -> list[str]:
        path = self._run_dir / "events.jsonl"
        if not path.exists():
            return []
        with path.open() as file:
            file.seek(self._events)
            lines = file.read().splitlines()
        return [json.loads(line)["stage"] for line in lines if line.endswith("}")]


def strike(spec: dict[str, Any], run_dir: Path, log: Path, rng: random.Random, train_s: float, ranks: int) -> Any:
    """Start or resume the run and hit one of its ranks. Return the Kill; None if the run ended before; or what is
    wrong, as text."""
    went = Attempt(spec, run_dir, log)
    rank, how = rng.randrange(ranks), rng.choice((signal.SIGKILL, signal.SIGSTOP))
    early, wait_s = rng.random() < 0.25, rng.uniform(0.0, train_s)
    if not until(lambda: went.over() or (len(went.followers()) == ranks - 1 if early else went.trains()), SETUP_S):
        return f"does not train within {SETUP_S:g} s: {went.said()[-2000:]}"
    time.sleep(0 if went.over() else wait_s)
    followers = went.followers()
    if went.over() or len(followers) < ranks - 1:
        until(went.over, SETUP_S)
        return None if went.code == 0 else f"ended by itself with {went.code}: {went.said()[-2000:]}"
    family = [went.pid, *descendants(went.pid)]
    kill = Kill(rank, how, went.moment())
    started = time.monotonic()
    victim = went.pid if rank == 0 else followers[rank - 1]
    os.kill(victim, how)
    others = [pid for pid in family if pid != went.pid]
    if rank == 0:
        in_time = until(lambda: not any(map(alive, others)), DEADLINE_S + GRACE_S)
        kill.seconds = time.monotonic() - started
        logs = "".join(path.read_text(errors="replace") for path in (run_dir / "ranks").glob("*.txt"))
        named = how == signal.SIGKILL or "rank 0" in logs
        os.kill(went.pid, signal.SIGKILL)
        os.waitpid(went.pid, 0)
    else:
        in_time = until(went.over, DEADLINE_S + GRACE_S)
        kill.seconds = time.monotonic() - started
        named = f"RankLost: rank {rank} on host" in went.said() and went.code != 0
        if went.code == 0:  # it had done its work
            return None
        in_time &= until(lambda: not any(map(alive, others)), GRACE_S)
    if left := [pid for pid in family if alive(pid)]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return f"{kill}: {len(left)} processes are left after {DEADLINE_S + GRACE_S:g} s: {went.said()[-2000:]}"
    if not (in_time and named):
        return f"{kill}: in time {in_time}, by name {named}: {went.said()[-3000:]}"
    kill.lost_steps = max(0, steps_of(run_dir) - newest(run_dir))
    return kill


def trial(home: Path, spec: dict[str, Any], *, kills: int, ranks: int, seed: int) -> Told:
    import tandem.build.training
    import tandem.recipes.supervised
    import tandem.train.trainer  # noqa: F401 - once, and not in every attempt
    from tandem.runs.run_ending import digest_run

    rng, told = random.Random(seed), Told()
    home.mkdir(parents=True, exist_ok=True)
    whole = Attempt(spec, home / "whole", home / "whole.txt")
    until(whole.trains, SETUP_S)
    started = time.monotonic()
    if not until(whole.over, SETUP_S) or whole.code:
        told.problem(f"the run that was left alone failed: {whole.said()[-2000:]}")
        return told
    train_s, expected = time.monotonic() - started, digest_run(home / "whole")
    while len(told.kills) < kills and len(told.problems) < 3:
        run_dir, log = home / f"run-{told.runs}", home / f"run-{told.runs}.txt"
        told.runs += 1
        for _ in range(min(IN_A_RUN, kills - len(told.kills))):
            found = strike(spec, run_dir, log, rng, train_s, ranks)
            if not isinstance(found, Kill):
                break
            told.kills.append(found)
            print(f"{len(told.kills)}: {found}", file=sys.stderr, flush=True)
        else:
            found = None
        if isinstance(found, str):
            told.problem(f"{run_dir.name}: {found}")
            continue
        _, status = os.waitpid(forked(lambda at=run_dir: attempt(spec, at), log), 0)
        digest = digest_or_error(run_dir)
        if status or digest != expected:
            what = f"ended with {status}" if status else f"{digest} instead of {expected}"
            told.problem(f"{run_dir.name}: {what}: {log.read_text()[-2000:]}")
    return told


def until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in content.split("\0") if "=" in each)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--kills", type=int, default=40)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as root:
        spec = cases(Path(root), steps=20)["SFT"]
        spec |= {"parallel": {"ranks": options.ranks, "shares": 4, "deadline_s": DEADLINE_S}}
        told = trial(Path(root) / "SFT", spec, kills=options.kills, ranks=options.ranks, seed=options.seed)
    rows: list[list[str]] = []
    for how in (signal.SIGKILL, signal.SIGSTOP):
        for name, ranks in (("rank 0", {0}), ("another rank", set(range(1, options.ranks)))):
            found = [kill for kill in told.kills if kill.how == how and kill.rank in ranks]
            moments = {moment: sum(kill.moment == moment for kill in found) for moment in MOMENTS}
            seconds = [kill.seconds for kill in found]
            took = f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else ""
            lost = str(max((kill.lost_steps for kill in found), default=0))
            rows.append(
                [f"{how.name} of {name}", str(len(found)), *(str(moments[each]) for each in MOMENTS), took, lost]
            )
    table(
        ["what", "times", *(f"in {each}" for each in MOMENTS), "s until all had ended", "most steps made again"], rows
    )
    note(f"{told.runs} runs of {options.ranks} ranks; {len(told.problems)} problems; must be 0, each kill within "
         f"{DEADLINE_S + GRACE_S:g} s")  # fmt: skip
    sys.exit(bool(told.problems))


MOMENTS = ("start", "step", "save", "end")

if __name__ == "__main__":
    main()
