"""What both ends of a meeting write to each other comes as it was written, short or long."""

from __future__ import annotations

import pytest

from tandem.bridge import notes


@pytest.mark.parametrize("text", ["", "{}", "=", "ü" * 100, "x" * (2**16 - 1), "x" * 2**16, '{"a": 1}' * 100_000])
def test_a_note_is_read_as_it_was_written(text: str) -> None:
    packed = notes._packed(text)
    assert notes._unpacked(packed.encode()) == text
    assert len(packed) < 2**17
