"""What both ends of a meeting write to each other comes as it was written, short or long."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest

from tandem.bridge.collective import control_channel


@pytest.mark.parametrize("text", ["", "{}", "=", "ü" * 100, "x" * (2**16 - 1), "x" * 2**16, '{"a": 1}' * 100_000])
def test_a_note_is_read_as_it_was_written(text: str) -> None:
    packed = control_channel.packed(text)
    assert control_channel.unpacked(packed.encode()) == text
    assert len(packed) < 2**17


def test_a_store_of_this_process_is_reached_however_short_the_others_deadline_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine that took longer than 1.5 s: a meeting failed that nobody had come to yet."""
    asked = list[timedelta]()

    class Store(control_channel.TCPStore):
        def __init__(self, *args: Any, timeout: timedelta, **options: Any) -> None:
            asked.append(timeout)
            super().__init__(*args, timeout=timeout, **options)

    monkeypatch.setattr(control_channel, "TCPStore", Store)
    listening = socket.create_server(("127.0.0.1", 0))
    meeting = control_channel.ChannelAddress(
        "broadcast", "127.0.0.1", listening.getsockname()[1], "token", 1, 2, "cpu", 1.5
    )
    store = meeting.host_it(listening)
    assert asked[0] >= timedelta(seconds=10)
    assert store.timeout == timedelta(seconds=1.5)
