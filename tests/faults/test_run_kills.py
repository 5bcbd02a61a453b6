"""Runs under kill -9: a short form of benchmarks/run_kills.py, with room for a busy machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A fresh process: what is forked from it has nothing of a test runner's threads.
TRIALS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run_kills
for name in ("SFT", "LoRA"):
    home = Path(sys.argv[2]) / name
    home.mkdir()
    told = run_kills.trial(home, run_kills.cases(home, steps=2)[name], kills=2, seed=3)
    print(name, told)
    if told.problems or told.kills < 2:
        sys.exit(1)
"""


@pytest.mark.timeout(600)
def test_runs_that_were_killed_again_and_again_end_with_the_same_bytes(tmp_path: Path) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, "-c", TRIALS, str(benchmarks), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
