"""Either side is killed or stopped at a random instant: `make sync-kills` in short."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sync_kills


def test_whoever_is_left_notices_recovers_and_serves_what_was_announced(capsys: pytest.CaptureFixture[str]) -> None:
    code = sync_kills.main(["--instants", "2", "--modes", "shared"])
    printed = capsys.readouterr()
    assert code == 0, printed
    figures = json.loads(printed.out.splitlines()[-1])
    assert (figures["instants"], figures["hangs"], figures["unannounced"]) == (2, 0, 0)
    assert figures["looks"] >= 4, "nothing was compared"
