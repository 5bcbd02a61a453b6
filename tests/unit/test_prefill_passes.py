"""The benchmark of passes of hybrids refuses a family that it does not know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "prefill_passes.py"


def test_a_family_that_is_not_known_is_refused_with_those_that_are() -> None:
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--only", "LFM3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'LFM3' (choose from" in done.stderr
