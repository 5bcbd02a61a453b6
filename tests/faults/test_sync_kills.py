"""Either side is killed or stopped at a random instant: `make sync-kills` in short."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_an_engine_that_does_not_start_in_time_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_kills, "START_S", 0.0)
    trainer: Any = SimpleNamespace()
    pair = sync_kills.Pair("restart", tmp_path)
    pair.trainers.append(trainer)
    found = sync_kills.Found("restart", "engine", "SIGKILL")
    pair.strike_owned(found, trainer, signal.SIGKILL)
    assert found.hangs == ["the trainer's engine did not start"]


def test_a_file_of_a_process_that_has_just_ended_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text('{"pid": 7}')
    assert sync_kills.newest_pid([tmp_path / "gone.json", tmp_path / "ready.json"]) == 7
    assert sync_kills.newest_pid([tmp_path / "gone.json"]) is None
