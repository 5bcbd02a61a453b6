"""What a process held at most: its own, whoever started it."""

from __future__ import annotations

import subprocess
import sys

from tandem.ops import host_memory

_CHILD = "from tandem.ops import host_memory; print(host_memory.peak_bytes())"


def test_a_process_that_a_large_one_starts_is_not_counted_as_large():
    large = bytearray(2**29)
    large[::4096] = b"1" * len(range(0, len(large), 4096))
    assert host_memory.peak_bytes() > 2**29
    told = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True)
    assert 2**20 < int(told.stdout) < 2**29


def test_what_is_given_back_still_counts():
    before = host_memory.peak_bytes()
    large = bytearray(before)
    large[::4096] = b"1" * len(range(0, len(large), 4096))
    del large
    assert host_memory.peak_bytes() > before
