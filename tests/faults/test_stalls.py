"""Every kind of stall is noticed, and no false one. The limit is a second; processes and signals are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.runs.liveness import Observer, ProgressCounter, Sign, Watchdog, all_stacks, read_sign

LIMIT_S = 1.0

RUN = """
import sys, threading, time
from pathlib import Path
from tandem.runs import liveness
from tandem.runs.liveness import ProgressCounter, Watchdog

liveness._LONGEST_LOOK_S = {limit} / 4  # as the limit of a run is many of them
home = Path(sys.argv[1])
progress = ProgressCounter(home, setup_s={limit}, step_s={limit})
watchdog = Watchdog(progress, home / "stacks.txt", lambda sign, quiet_s: (home / "told").write_text(sign.stage))
watchdog.start()
progress.stage("rl")

def work(steps):
    for step in range(steps):
        time.sleep(0.02)
        progress.step(step)

def dead_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def busy_loop():
    while True:
        pass

work(10)
{then}
"""


@contextmanager
def running(home: Path, then: str, *, clocks: str = "") -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ)
    if clocks:
        (home / "clocks").mkdir()
        (home / "clocks" / "sitecustomize.py").write_text(clocks)
        environment["PYTHONPATH"] = str(home / "clocks")
    code = textwrap.dedent(RUN).format(limit=LIMIT_S, then=then)
    child = subprocess.Popen([sys.executable, "-c", code, str(home)], env=environment)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


@dataclass
class Stall:
    seconds: float
    """That it has lasted by the clock of whoever looks."""
    longest_look_s: float
    """Between two looks."""


def stall_seen(home: Path, child: subprocess.Popen[bytes], patience_s: float) -> Stall | None:
    """As an observer outside sees it; None if it saw none while the process was there."""
    observer, until = Observer(), time.monotonic() + 20
    while read_sign(home) is None and time.monotonic() < until:
        time.sleep(0.02)
    started = looked = moved = time.monotonic()
    longest_look_s, seen = 0.0, None
    while looked - started < patience_s and child.poll() is None:
        sign, now = read_sign(home), time.monotonic()
        longest_look_s, looked = max(longest_look_s, now - looked), now
        if sign != seen:
            seen, moved, longest_look_s = sign, now, 0.0
        if observer.look(sign):
            return Stall(now - moved, longest_look_s)
        time.sleep(0.02)
    return None


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["dead_lock", "busy_loop"])
def test_a_thread_that_hangs_is_seen_from_outside_and_its_stack_is_written_from_inside(tmp_path: Path, kind: str):
    with running(tmp_path, f"{kind}()") as child:
        stall = stall_seen(tmp_path, child, 10)
        assert stall is not None
        assert LIMIT_S - 0.01 < stall.seconds < LIMIT_S + stall.longest_look_s + 0.01  # at the first look that can
        told = tmp_path / "told"
        wait_until(lambda: told.exists() and told.read_text())
        assert told.read_text() == "rl"
        stacks = (tmp_path / "stacks.txt").read_text()
        assert "thread MainThread" in stacks
        assert f"in {kind}" in stacks


def test_a_process_that_is_stopped_is_seen_from_outside(tmp_path: Path):
    with running(tmp_path, "work(1000)") as child:
        wait_until(lambda: read_sign(tmp_path) is not None)
        child.send_signal(signal.SIGSTOP)
        assert stall_seen(tmp_path, child, 10) is not None
        assert not (tmp_path / "told").exists()
        # It goes on, and whoever was stopped along with it counts none of that.
        child.send_signal(signal.SIGCONT)
        time.sleep(0.6)
        assert not (tmp_path / "told").exists()
        assert stall_seen(tmp_path, child, 1.5) is None


def test_the_interpreter_held_by_native_code_still_gives_its_stacks_to_a_signal(tmp_path: Path):
    hold = "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')"  # backtracks for ever, and never lets go
    with running(tmp_path, hold) as child:
        assert stall_seen(tmp_path, child, 10) is not None
        child.send_signal(signal.SIGUSR1)
        wait_until(lambda: "most recent call first" in (tmp_path / "stacks.txt").read_text())


JUMPS = """
import time
real, start = time.time, time.time()
time.time = lambda: start + (real() - start) * 2 + (86400 if int(real() * 5) % 2 else -86400)
"""


def test_clocks_that_jump_and_run_double_are_no_stall_and_hide_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() * 2 + 7200)
    (tmp_path / "live").mkdir()
    with running(tmp_path / "live", "work(1000)", clocks=JUMPS) as child:
        assert stall_seen(tmp_path / "live", child, 2.5) is None
        assert not (tmp_path / "live" / "told").exists()
    (tmp_path / "dead").mkdir()
    with running(tmp_path / "dead", "dead_lock()", clocks=JUMPS) as child:
        assert stall_seen(tmp_path / "dead", child, 10) is not None


def test_slow_but_live_steps_are_no_stall():
    """An hour of steps that each take nine tenths of the limit, on a clock of the test's own."""
    now = 0.0
    observer = Observer(clock=lambda: now)
    for step in range(400):
        for _ in range(9):
            now += 1.0
            assert not observer.look(Sign("p", step, "rl", step, 10.0))


def test_an_observer_that_was_stopped_itself_counts_no_stall():
    now = 0.0
    observer = Observer(clock=lambda: now)
    observer.look(Sign("p", 1, "rl", 1, 10.0))
    now += 7200
    assert not observer.look(Sign("p", 1, "rl", 1, 10.0))
    for _ in range(3):
        now += 4
        stalled = observer.look(Sign("p", 1, "rl", 1, 10.0))
    assert stalled


def test_the_limit_is_the_stage_s_and_a_new_process_begins_anew(tmp_path: Path):
    progress = ProgressCounter(tmp_path, setup_s=300, step_s=20)
    progress.stage("rl")
    assert read_sign(tmp_path) == progress.sign()
    assert progress.sign().limit_s == 300
    progress.step(1)
    assert read_sign(tmp_path) == progress.sign()
    assert progress.sign().limit_s == 20
    progress.stage("eval")
    assert progress.sign().limit_s == 300
    now = 0.0
    observer = Observer(clock=lambda: now)
    observer.look(Sign("1:1", 5, "rl", 1, 3.0))
    now += 2
    observer.look(Sign("2:9", 5, "rl", 1, 3.0))  # resumed: as many ticks, but another process
    now += 2
    assert not observer.look(Sign("2:9", 5, "rl", 1, 3.0))


def test_a_file_that_is_torn_or_no_sign_is_none(tmp_path: Path):
    assert read_sign(tmp_path) is None
    for text in ("", "{", "[]", '{"ticks": "x"}'):
        (tmp_path / "progress.json").write_text(text)
        assert read_sign(tmp_path) is None


def test_ticks_cost_next_to_nothing(tmp_path: Path):
    progress = ProgressCounter(tmp_path)
    started = time.thread_time()
    for _ in range(20000):
        progress.tick()
    assert (time.thread_time() - started) / 20000 < 50e-6
    assert "thread" in all_stacks("x") or "---" in all_stacks("x")


def test_a_watchdog_leaves_nothing_behind(tmp_path: Path):
    watchdog = Watchdog(ProgressCounter(tmp_path), tmp_path / "stacks.txt", lambda sign, quiet_s: None)
    watchdog.start()
    watchdog.stop()
    assert not (tmp_path / "stacks.txt").exists()
