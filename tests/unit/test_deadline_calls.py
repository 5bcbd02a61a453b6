"""Calls that are left behind when time is up, on threads that are kept for the next one."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

from stopwatch import Stopwatch
from tandem.bridge.common.deadline import Deadline
from tandem.errors import SyncTimeout


def test_one_call_after_another_takes_one_thread():
    deadline = Deadline("broadcast", 10.0)
    used = {deadline.call(threading.get_ident, "it was not asked") for _ in range(20)}
    assert len(used) <= 2  # it comes back a moment after its result does


def test_an_error_is_the_callers_and_the_next_call_goes_on():
    deadline = Deadline("broadcast", 10.0)
    with pytest.raises(ZeroDivisionError):
        deadline.call(lambda: 1 // 0, "it was not divided")
    assert deadline.call(lambda: 3, "it was not asked") == 3


def test_who_is_left_behind_keeps_nobody_waiting():
    stuck = threading.Event()
    with pytest.raises(SyncTimeout, match=r"it did not come within 0\.1 s"):
        Deadline("broadcast", 0.1).call(lambda: stuck.wait(20), "it did not come")
    with Stopwatch() as watch:
        assert Deadline("broadcast", 10.0).call(lambda: 4, "it was not asked") == 4
    assert watch.seconds < 5
    stuck.set()


def _asked(answer: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    answer.put(Deadline("broadcast", 10.0).call(lambda: 5, "it was not asked"))


def test_a_forked_process_has_threads_of_its_own():
    """The parent's, which wait for the next call there, do not exist in it."""
    assert Deadline("broadcast", 10.0).call(lambda: 1, "it was not asked") == 1
    time.sleep(0.1)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_asked, args=(answer,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert answer.get() == 5
