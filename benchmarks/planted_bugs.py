"""Plant each bug of planted_bugs.toml in a copy of src, and require that its test turns red.

python benchmarks/planted_bugs.py [--only TEXT ...] [--jobs 2] [--list]

The checkout is never changed: each bug is planted in a temporary copy, which PYTHONPATH puts before the installed
package. All named tests must be green without a bug. An entry whose old text does not occur exactly once is refused:
the source has changed, and the entry must follow. Exit code 1 if a bug survives, an entry is refused, or a test is red
without one. Each test runs in a fork of this process, which has imported torch and transformers once for all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from common import table

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 300
IN_A_FORK = ("-x", "-p", "no:rerunfailures", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider")
FAILED = 1
"""pytest's exit code where tests ran and some failed. A test that cannot be collected, or is not there, has another."""


@dataclass(frozen=True)
class PlantedBug:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str
    """What would go wrong for a user."""


@dataclass(frozen=True)
class Outcome:
    bug: PlantedBug
    word: str
    """red; SURVIVED; REFUSED: its old text is not there once; or UNCLEAR: pytest did not come to an end."""
    seconds: float = 0.0


def read_list(file: Path = LIST) -> list[PlantedBug]:
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["bug"]
    bugs = [PlantedBug(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    if len({bug.name for bug in bugs}) < len(bugs):
        raise SystemExit(f"{file}: two entries have one name")
    return bugs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="Entries whose name or file contains one of these texts.")
    parser.add_argument("--jobs", type=int, default=2, help="Bugs at a time. Default: 2.")
    parser.add_argument("--list", action="store_true", help="Print the entries, and run nothing.")
    asked = parser.parse_args()
    wanted = [each for each in read_list() if not asked.only or any(t in each.name + each.file for t in asked.only)]
    if asked.list:
        table(["bug", "file", "what it breaks"], [[bug.name, bug.file, bug.breaks] for bug in wanted])
        return 0
    outcomes = [Outcome(bug, "REFUSED") for bug in wanted if occurrences(bug) != 1]
    plantable = [bug for bug in wanted if occurrences(bug) == 1]
    red_before = red_without_a_bug(plantable, asked.jobs)
    import_the_heavy_packages()
    outcomes += planted((bug for bug in plantable if not red_before.intersection(bug.tests)), asked.jobs)
    rows = [[each.bug.name, each.bug.file, each.word, f"{each.seconds:.0f}", each.bug.breaks] for each in outcomes]
    table(["bug", "file", "test", "s", "what it breaks"], rows)
    odd = [each for each in outcomes if each.word != "red"]
    print(f"\n{len(outcomes) - len(odd)} of {len(wanted)} planted bugs turn their test red")
    for test in sorted(red_before):
        print(f"red without a bug: {test}")
    return int(bool(odd or red_before))


def occurrences(bug: PlantedBug) -> int:
    file = ROOT / bug.file
    return file.read_text(encoding="utf-8").count(bug.old) if file.exists() and bug.old != bug.new else 0


def red_without_a_bug(bugs: Sequence[PlantedBug], jobs: int) -> set[str]:
    """Run all tests on the source as it is; return those that fail, as the entries name them."""
    tests = sorted({test for bug in bugs for test in bug.tests})
    if not tests:
        return set()
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-rfE", "--numprocesses", f"{jobs}", "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    red = set(re.findall(r"^(?:FAILED|ERROR) ([\w/]+\.py(?:::\w+)?)", done.stdout, re.MULTILINE))
    if done.returncode and not red:
        raise SystemExit(f"the tests did not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {test for test in tests if test in red or test.partition("::")[0] in red}


def python_path(source: Path) -> str:
    return os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))


def import_the_heavy_packages() -> None:
    """Before any fork, on one thread: a thread of torch's would not be there in the child."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    assert transformers.LlamaForCausalLM
    assert "tandem" not in sys.modules, "it must come from the copy"


@dataclass
class Trial:
    """A bug in a copy of its own, and the process that runs its tests."""

    bug: PlantedBug
    folder: Path
    began: float


def planted(bugs: Iterable[PlantedBug], jobs: int) -> list[Outcome]:
    waiting, running, outcomes = list(bugs), dict[int, Trial](), list[Outcome]()
    while waiting or running:
        while waiting and len(running) < jobs:
            pid, trial = start(waiting.pop(0))
            running[pid] = trial
        for pid in [*running]:
            outcome = ended(pid, running[pid])
            if outcome is not None:
                shutil.rmtree(running.pop(pid).folder, ignore_errors=True)
                outcomes.append(outcome)
                print(f"{outcome.word:<8} {outcome.seconds:4.0f} s  {outcome.bug.name}", file=sys.stderr, flush=True)
        time.sleep(0.05)
    return outcomes


def start(bug: PlantedBug) -> tuple[int, Trial]:
    trial = Trial(bug, Path(tempfile.mkdtemp(prefix="planted-bug-")), time.monotonic())
    shutil.copytree(ROOT / "src", trial.folder / "src")
    file = trial.folder / bug.file
    file.write_text(file.read_text(encoding="utf-8").replace(bug.old, bug.new), encoding="utf-8")
    if pid := os.fork():
        return pid, trial
    code = -1
    try:
        os.setpgid(0, 0)
        os.chdir(ROOT)
        for stream in (1, 2):
            os.dup2(os.open(trial.folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ["PYTHONPATH"] = python_path(trial.folder / "src")  # of processes that the tests start
        sys.path.insert(0, str(trial.folder / "src"))
        code = int(pytest.main([*OPTIONS, *IN_A_FORK, *bug.tests]))
        if "tandem" in sys.modules and not str(sys.modules["tandem"].__file__).startswith(str(trial.folder)):
            code = -1
    finally:
        os._exit(code & 0xFF)


def ended(pid: int, trial: Trial) -> Outcome | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    seconds = time.monotonic() - trial.began
    if not done and seconds < TIMEOUT_S:
        return None
    with suppress(ProcessLookupError):  # and whatever a failed test left behind
        os.killpg(pid, signal.SIGKILL)
    if not done:
        os.waitpid(pid, 0)
        return Outcome(trial.bug, "UNCLEAR", seconds)
    word = {FAILED: "red", 0: "SURVIVED"}.get(os.waitstatus_to_exitcode(status), "UNCLEAR")
    return Outcome(trial.bug, word, seconds)


if __name__ == "__main__":
    sys.exit(main())
