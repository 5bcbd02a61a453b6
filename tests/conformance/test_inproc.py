"""What the two in-process bridges promise beyond what every bridge must do."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
import torch

from stopwatch import Stopwatch
from tandem.bridge.inproc import InprocBridge, InprocSource
from tandem.bridge.null import NullBridge
from tandem.errors import SyncError, SyncTimeout
from tandem.types import Weights


def weights(version: int) -> Weights:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
    return Weights(version, "live", lambda: iter(tensors.items()))


def test_inproc_carries_the_very_tensors() -> None:
    tensor = torch.randn(3)
    bridge = InprocBridge()
    source = bridge.source()
    bridge.send(Weights(1, "live", lambda: iter([("a", tensor)])))
    ((name, received),) = source.receive(1).tensors()
    assert name == "a"
    assert received is tensor


@pytest.mark.parametrize("left_over", [None, 6])
def test_inproc_gives_up_on_a_version_that_does_not_come(left_over: int | None) -> None:
    bridge = InprocBridge(deadline_s=0.1)
    source = bridge.source()
    if left_over is not None:
        bridge.send(weights(left_over))
    with Stopwatch() as watch, pytest.raises(SyncTimeout, match=r"version 7 was not sent within 0\.1 s"):
        source.receive(7)
    assert watch.seconds < 2


def test_inproc_passes_over_what_an_earlier_receive_left_and_refuses_a_later_version() -> None:
    bridge = InprocBridge(deadline_s=0.1)
    source = bridge.source()
    for version in (6, 7, 8):
        bridge.send(weights(version))
    assert source.receive(7).version == 7
    with pytest.raises(SyncError, match="asked for version 7, sent was 8"):
        source.receive(7)


def test_inproc_ends_in_time_for_two_who_wait_as_one_version_comes_at_the_last_moment() -> None:
    """An engine that gave up, and the same engine asked anew, wait for one rank; 0.9 to 1.1 times the deadline."""
    deadline_s = 0.004
    for attempt in range(300):
        source = InprocBridge(deadline_s).source()

        def receive(source: InprocSource = source) -> None:
            with suppress(SyncTimeout):
                source.receive(1)

        waiting = [threading.Thread(target=receive, daemon=True) for _ in range(2)]
        sent_at = time.perf_counter() + deadline_s * (0.9 + 0.2 * (attempt % 50) / 50)
        for thread in waiting:
            thread.start()
        while time.perf_counter() < sent_at:
            pass
        source.offer(weights(1))
        for thread in waiting:
            thread.join(5)
            assert not thread.is_alive()


def test_inproc_sends_nothing_to_sources_of_a_closed_bridge() -> None:
    bridge = InprocBridge(deadline_s=0.05)
    source = bridge.source()
    bridge.close()
    bridge.send(weights(1))
    with pytest.raises(SyncTimeout):
        source.receive(1)


def test_null_carries_no_tensor() -> None:
    bridge = NullBridge()
    bridge.send(weights(3))
    assert list(bridge.source().receive(3).tensors()) == []
