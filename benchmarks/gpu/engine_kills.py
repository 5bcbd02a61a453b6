"""Engines that are killed and join again under load: `python benchmarks/gpu/engine_kills.py --shape qwen3-0.6b`.

`tandem train` (GRPO) with one trainer and `--engines` engines, each on a GPU of its own. With `--bridge disk` they
may share one GPU, which `--gpus` names; NCCL allows no two processes on one. At random instants one engine gets
SIGKILL: its `tandem engine serve`, or a process of vLLM below it. The next kill comes when the engine has joined: when
the ledger has a proof of a version that names its new boot id, and the others'. `--pause-s` spreads the requests of a
step, so that engines are never idle for long; after the last kill nothing pauses.

What must be, of what the run left behind:

    no group is lost       the trained groups are those of the first `steps x groups` tickets, in their order, and whole
    no token is unproven   of each trained token: the engine start that sampled it (served_by.py saw the answer come)
                           proved the token's version in the ledger, before the step that trained on it was made;
                           and no token is older than `max_lag`, which one of a start's own weights would be
    the run                ends by itself with 0 and all its steps; `tandem sync audit` finds it proven; trainer and
                           engines differ by less than the run's own limit; no process is left

Exit code 1 otherwise. On a CPU: `--engine server --shape tiny`. Details go to $OUT/engine-kills.json.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from ranks import Started
from served_by import lost_groups, unproven_tokens
from standing import checkpoint_of
from vowels import Vowels

from common import descendants, note, table
from tandem.build import standalone_engines
from tandem.io.jsonl import read_jsonl
from tandem.io.process_identity import identity, is_there
from tandem.obs.sync_audit import audit_sync
from tandem.recipes.random_checkpoints import SHAPES
from tandem.rollout.producer import task_order

OUT = Path(os.environ.get("OUT", "."))
WARM, SEED, SIZE = 3, 0, 8
BELOW = ("EngineCore", "VLLM::Worker")  # what vLLM calls its processes
Process = tuple[int, str]  # its id, and its identity


class Failed(Exception):
    pass


def spec_of(asked: argparse.Namespace, until: Path) -> dict[str, Any]:
    tiny, here = asked.shape == "tiny", Path(__file__)
    engine: dict[str, Any] = {
        "kind": asked.engine, "replicas": asked.engines, "max_context": asked.tokens + 512,
        "max_running": SIZE * asked.groups, "max_restarts": asked.kills + 2,
    }  # fmt: skip
    if asked.engine == "vllm":
        engine |= {"python": asked.python, "memory_share": asked.memory_share, "eager": asked.eager}
        if torch.cuda.is_available():
            engine["gpus"] = asked.gpus or list(range(1, asked.engines + 1))
    spec: dict[str, Any] = {
        "recipe": "rl", "name": "engine-kills", "deterministic": False, "seed": SEED,
        "model": {"preset": "tiny"} if tiny else {"path": str(checkpoint_of(asked)), "attention": "packed"},
        "environment": {"name": str(here.with_name("vowels.py"))}, "engine": engine,
        "callbacks": [str(here.with_name("served_by.py")) + ":ServedBy"],
        "sync": {"bridge": asked.bridge, "deadline_s": asked.deadline_s},
        "train": {
            "steps": asked.steps, "lr": asked.lr, "groups_per_step": asked.groups, "group_size": SIZE,
            "max_tokens": asked.tokens, "max_lag": asked.max_lag, "replace_equal_groups": 0, "max_logprob_gap": 0.3,
        },
        "eval": {"tasks": 2}, "checkpoint": {"every": 0},
    }  # fmt: skip
    spec["environment"]["params"] = {"pause_s": asked.pause_s, "until": str(until)}
    return spec if tiny else spec | {"precision": {"weights": "bfloat16"}}


# --- processes


def name_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def family_of(pid: int) -> set[Process]:
    return {(each, identity(each)) for each in descendants(pid)}


def left_of(family: set[Process], wait_s: float = 20.0) -> int:
    """Return how many of these have not ended in time, and end them."""
    until = time.monotonic() + wait_s
    while (left := [pid for pid, process in family if is_there(process)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


# --- the kills


class Run:
    """A run under way. `family`: all processes that it has had, so far as they were seen."""

    def __init__(self, asked: argparse.Namespace, home: Path) -> None:
        self.asked, self.until = asked, time.monotonic() + asked.limit_s
        self.enough, self.directory = home / "enough", home / "engine-kills"
        self.family: set[Process] = set()
        self.started = Started(spec_of(asked, self.enough), self.directory)

    def wait(self, what: str, until: Any, limit_s: float = 1e9) -> float:
        """Wait until `until()`, and return the seconds that it took."""
        began = time.monotonic()
        while not until():
            if self.started.process.poll() is not None:
                raise Failed(f"{what}: the run has ended: {self.started.what_it_said()}")
            if time.monotonic() > min(self.until, began + limit_s):
                raise Failed(f"{what}: not within {time.monotonic() - began:.0f} s")
            self.family |= family_of(self.started.process.pid)
            time.sleep(0.05)
        return time.monotonic() - began

    def ledger(self) -> list[dict[str, Any]]:
        return read_jsonl(self.directory / "sync.jsonl")

    def engine(self, number: int) -> int:
        """Return the process id of a replica that is ready, 0 if it is not."""
        path = self.directory / "engines" / f"engine-{number}" / "ready.json"
        with suppress(OSError, ValueError):
            return int(json.loads(path.read_text())["pid"])
        return 0

    def left_out(self) -> int:
        return (self.directory / "log.txt").read_text().count("is left out")

    def victim(self, number: int, below: bool) -> tuple[int, str]:
        """Return a process of the replica, and what it is."""
        serve = self.engine(number)
        if serve not in descendants(self.started.process.pid):
            raise Failed(f"engine {number}: process {serve} is not one of this run")
        if not below:
            return serve, "tandem engine serve"
        named = {pid: name_of(pid) for pid in descendants(serve)}
        if not (known := [pid for pid, name in named.items() if any(word in name for word in BELOW)]):
            known = [pid for pid, name in named.items() if "resource_tracker" not in name]
        if not known:
            raise Failed(f"engine {number}: no process below {serve}: {named}")
        return known[-1], (named[known[-1]].split() or ["?"])[0]

    def kill(self, number: int, below: bool) -> dict[str, Any]:
        before, out = self.ledger(), self.left_out()
        known = {boot for row in before for boot in row["engines"]}
        serve, step = self.engine(number), len(self.started.rows())
        pid, what = self.victim(number, below)

        def joined() -> bool:
            rows = self.ledger()[len(before) :]
            return any(len(row["engines"]) == self.asked.engines and set(row["engines"]) - known for row in rows)

        os.kill(pid, signal.SIGKILL)
        row: dict[str, Any] = {"engine": number, "killed": what, "at": time.time(), "step": step}
        row["out_s"] = self.wait(f"{what} killed, left out", lambda: self.left_out() > out, 60)
        row["started_s"] = row["out_s"] + self.wait(
            f"{what} killed, ready", lambda: self.engine(number) not in (0, serve)
        )
        row["joined_s"] = row["started_s"] + self.wait(f"{what} killed, joined", joined)
        proof = next(row for row in self.ledger()[len(before) :] if set(row["engines"]) - known)
        gone = set(before[-1]["engines"]) - {boot for row in self.ledger()[len(before) :] for boot in row["engines"]}
        return row | {"version": proof["version"], "gone": sorted(gone), "steps": len(self.started.rows()) - step}

    def kills(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(self.asked.seed)
        below = [self.asked.engine == "vllm" and number % 2 == 1 for number in range(self.asked.kills)]
        rng.shuffle(below)
        self.wait("the first steps", lambda: len(self.started.rows()) >= WARM)
        for each in below:
            pause = time.monotonic() + rng.uniform(0.0, self.asked.apart_s)
            self.wait("a random instant", lambda at=pause: time.monotonic() >= at)
            yield self.kill(rng.randrange(self.asked.engines), each)

    def end(self) -> None:
        """Let the run end by itself."""
        self.enough.touch()
        self.wait("the last steps", lambda: len(self.started.rows()) >= self.asked.steps)
        self.started.ended(max(1.0, self.until - time.monotonic()))

    def keep(self) -> None:
        """Keep the files that say what happened, and the end of each engine's log."""
        self.started.keep()
        for path in (self.directory / name for name in ("sync.jsonl", "served-by.jsonl", "log.txt")):
            if path.exists():
                (OUT / f"{self.directory.name}-{path.name}").write_bytes(path.read_bytes())
        for path in self.directory.glob("engines/*/*log*.txt"):
            (OUT / f"{self.directory.name}-{path.parent.name}-{path.name}").write_bytes(path.read_bytes()[-100_000:])


# --- what it left behind


def found_in(run: Run, kills: list[dict[str, Any]]) -> dict[str, Any]:
    asked, rows, ledger = run.asked, run.started.rows(), run.ledger()
    written = read_jsonl(run.directory / "served-by.jsonl")
    steps, cut = [row for row in written if "step" in row], [row for row in written if "cut" in row]
    for each in kills:
        each["cut"] = sum(row["cut"] in each["gone"] for row in cut)
    tasks = Vowels().tasks("train")
    ticket = task_order(len(tasks), SEED)
    expected = [tasks[ticket(number)].id for number in range(len(steps) * asked.groups)]
    lost, odd_groups = lost_groups(steps, expected, SIZE)
    tokens, unproven, odd_tokens = unproven_tokens(steps, ledger, asked.max_lag)
    audit, seconds = audit_sync(run.directory), [row["time/step_s"] for row in rows]
    dropped = sum(row.get("groups/dropped", 0.0) for row in rows)
    problems = [
        *odd_groups,
        *odd_tokens,
        *(f"audit: {each.text}" for each in audit.findings if each.severity != "note"),
    ]
    code = run.started.process.returncode
    problems += [f"the run ended with {code}: {run.started.what_it_said()}"] if code else []
    problems += [f"{len(rows)} steps of {asked.steps}"] if len(rows) != asked.steps else []
    problems += [f"the run says that it dropped {dropped:.0f} groups"] if dropped else []
    problems += [] if sum(each["cut"] for each in kills) else ["no kill cut a request: it was not under load"]
    return {
        "lost": lost, "unproven": unproven, "tokens": tokens, "groups": sum(len(row["tasks"]) for row in steps),
        "problems": problems, "kills": kills, "median_s": statistics.median(seconds), "longest_s": max(seconds),
        "seconds": seconds, "lag": max(row.get("lag/max", 0.0) for row in rows),
        "by_engine": Counter(boot for row in ledger for boot in row["engines"]), "proofs": len(ledger),
        "gaps": {
            name: max((row[f"sync/{name}"] for row in rows if f"sync/{name}" in row), default=0.0)
            for name in ("logprob_gap", "logprob_gap_limit", "logprob_gap_older", "logprob_gap_older_limit")
        },
    }  # fmt: skip


def measured(asked: argparse.Namespace, home: Path) -> dict[str, Any]:
    run = Run(asked, home)
    kills, why = list[dict[str, Any]](), list[str]()
    try:
        for kill in run.kills():
            kills.append(kill)
            print(f"{kill['killed']} of engine {kill['engine']}: joined after {kill['joined_s']:.1f} s", flush=True)
        run.end()
    except Failed as error:
        why.append(str(error))
    finally:
        run.family |= family_of(run.started.process.pid)
        run.started.end()
        if left := left_of(run.family):
            why.append(f"{left} processes were left")
        run.keep()
    found: dict[str, Any] = {"problems": [], "kills": kills}
    if len(run.started.rows()) > WARM:
        found = found_in(run, kills)
    return found | {"problems": [*why, *found["problems"]]}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b" if gpu else "tiny", choices=["tiny", *SHAPES])
    parser.add_argument("--checkpoint", type=Path, help="instead of a random one, made once a machine")
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="that makes it")
    parser.add_argument("--engine", default="vllm" if gpu else "server", choices=["vllm", "server"])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--gpus", type=int, nargs="+", help="of the engines; one for all of them, or one for each")
    parser.add_argument("--bridge", default="broadcast", choices=["broadcast", "disk"])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the engines")
    parser.add_argument("--apart-s", type=float, default=8.0, help="the most between an engine that joined and a kill")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--pause-s", type=float, default=6.0, help="the most that an answer waits until the last kill")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--memory-share", type=float, default=0.6)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: vLLM starts sooner, and decodes slower")
    parser.add_argument("--deadline-s", type=float, default=30.0, help="of a version")
    parser.add_argument("--limit-s", type=float, default=560.0, help="of the whole run")
    parser.add_argument("--python", default=standalone_engines.default_python())
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    note(f"engine_kills.py {' '.join(sys.argv[1:])}; {torch.cuda.device_count()} GPUs")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        found = measured(asked, Path(place))
    (OUT / "engine-kills.json").write_text(json.dumps({"asked": vars(asked), **found}, indent=1, default=str))
    table(
        ("killed", "of engine", "after step", "requests cut", "left out after", "ready after", "joined after", "with"),
        [
            (
                row["killed"], str(row["engine"]), str(row["step"]), str(row.get("cut", "")), f"{row['out_s']:.1f} s",
                f"{row['started_s']:.1f} s", f"{row['joined_s']:.1f} s", f"version {row['version']}",
            )
            for row in found["kills"]
        ],
    )  # fmt: skip
    if "lost" in found:
        gaps = ", ".join(f"{name} {value:.4g}" for name, value in found["gaps"].items())
        print(f"steps: median {found['median_s']:.2f} s, longest {found['longest_s']:.2f} s; lag {found['lag']:.0f}")
        print(f"most of any step: {gaps}")
    for problem in found["problems"][:20]:
        print(f"PROBLEM: {problem}")
    lost, unproven, tokens = (found.get(name, "?") for name in ("lost", "unproven", "tokens"))
    print(f"{lost} groups lost, {unproven} unproven tokens of {tokens}")
    sys.exit(bool(found["problems"] or found.get("lost") or found.get("unproven")))


if __name__ == "__main__":
    main()
