"""How many values a JSON text holds, counted before it is parsed: a list of empty lists takes sixty times its size."""

from __future__ import annotations

import numpy as np

_PIECE_BYTES = 2**20
_BEFORE_VALUES = b"[{,:"  # each value stands behind one of these, but for the first
_IS_BEFORE_VALUE = np.isin(np.arange(256), list(_BEFORE_VALUES))


def holds_more_values(text: bytes, most: int) -> bool:
    """Return whether a JSON text has more values than `most`; an object's entries count up to three times."""
    if sum(text.count(mark) for mark in _BEFORE_VALUES) < most:
        return False  # even if none of these marks stood within a string
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # what is a quote now opens a string, or closes it
    count, inside = 1, np.zeros(1, dtype=np.bool_)
    for begin in range(0, len(plain), _PIECE_BYTES):
        piece = np.frombuffer(plain[begin : begin + _PIECE_BYTES], dtype=np.uint8)
        quoted = np.logical_xor.accumulate(np.concatenate([inside, piece == ord('"')]))
        count += int(np.count_nonzero(_IS_BEFORE_VALUE[piece] & ~quoted[1:]))
        inside = quoted[-1:]
    return count > most
