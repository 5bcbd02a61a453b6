"""Runs under kill -9: a short form of benchmarks/run_kills.py, with room for a busy machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A fresh process: what is forked from it has nothing of a test runner's threads.
TRIAL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run_kills
home = Path(sys.argv[2])
told = run_kills.trial(home, run_kills.cases(home, steps=2)[sys.argv[3]], kills=int(sys.argv[4]), seed=3)
print(told)
sys.exit(bool(told.problems) or told.kills < int(sys.argv[4]))
"""


@pytest.mark.parametrize(("case", "kills"), [("SFT", 2), ("LoRA", 2)])
def test_a_run_that_was_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, case: str, kills: int) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, "-c", TRIAL, str(benchmarks), str(tmp_path), case, str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
