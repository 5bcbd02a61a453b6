"""Either side is killed or stopped at a random instant: `make sync-kills` in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "sync_kills.py"


def test_whoever_is_left_notices_recovers_and_serves_what_was_announced() -> None:
    command = [sys.executable, str(PROGRAM), "--instants", "2", "--modes", "shared"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=380, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert (figures["instants"], figures["hangs"], figures["unannounced"]) == (2, 0, 0)
    assert figures["looks"] >= 4, "nothing was compared"
