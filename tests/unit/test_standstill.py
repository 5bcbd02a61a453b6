"""A machine that stands still is told from code that is slow, and from tests that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from standstill import Standstill

TESTS = Path(__file__).parents[1]
STAND_STILL = """
import os, signal, subprocess
from pathlib import Path
from standstill import Standstill

longest_s = Standstill.longest_s

def counted(machine):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write("asked ")
    return longest_s(machine)

Standstill.longest_s = counted

def stand_still():
    subprocess.Popen(["sh", "-c", f"sleep 0.8; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def first_time(name):
    done = Path(__file__).with_name(name)
    return not done.exists() and done.write_text("") == 0
"""
PLAYED = """
def test_met_by_a_pause():
    if first_time("paused"):
        stand_still()
        assert False, "its lease ran out"

def test_wrong_with_a_pause_and_without():
    if first_time("wrong"):
        stand_still()
    assert False

def test_wrong_once():
    assert not first_time("once")

def test_right_with_a_pause():
    stand_still()
"""


@pytest.fixture
def machine() -> Iterator[Standstill]:
    with Standstill() as machine:
        yield machine


def test_a_test_that_failed_is_done_again_only_where_the_machine_stood_still(tmp_path: Path) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_played.py").write_text(STAND_STILL + PLAYED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--rerun-show-tracebacks", "."]
    played = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False
    )
    told = {line for line in played.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "RERUN"))}
    told = {(line.split()[0], line.split("::")[1].split()[0]) for line in told if "::" in line}
    assert told == {
        ("RERUN", "test_met_by_a_pause"),
        ("PASSED", "test_met_by_a_pause"),
        ("RERUN", "test_wrong_with_a_pause_and_without"),
        ("FAILED", "test_wrong_with_a_pause_and_without"),
        ("FAILED", "test_wrong_once"),
        ("PASSED", "test_right_with_a_pause"),
    }, played.stdout
    assert "2 failed, 2 passed, 2 rerun" in played.stdout
    assert "its lease ran out" in played.stdout
    assert (tmp_path / "asked").read_text().split() == ["asked"] * 4, "it waits after the four failures alone"


@pytest.mark.skipif(sys.platform != "linux", reason="no thread can choose its processor")
def test_one_processor_that_gives_no_time_is_seen(machine: Standstill) -> None:
    """As one that the host takes away, for so long only that no other test minds."""
    hog = "import os, time; os.sched_setaffinity(0, {%d}); os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    hog += "; ends = time.monotonic() + 0.25\nwhile time.monotonic() < ends: pass"
    played = subprocess.run(
        [sys.executable, "-c", hog % min(os.sched_getaffinity(0))], capture_output=True, check=False
    )
    if b"PermissionError" in played.stderr:
        pytest.skip("this machine lets nobody take a processor for himself")
    assert machine.longest_s() > 0.2


def test_who_works_without_a_break_or_waits_does_not_stand_still(machine: Standstill) -> None:
    began = time.process_time()
    3 ** (2**22)  # no other thread gets its turn
    assert time.process_time() - began > 0.3
    time.sleep(0.5)
    assert machine.longest_s() < 0.25
