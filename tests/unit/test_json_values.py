"""Values of a JSON text are counted without parsing it, and marks within its strings are not taken for any."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tandem.io import json_size
from tandem.io.json_size import holds_more

VALUES = b"[{,:"


def number_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(number_of, inner))


def lists_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(lists_of, inner))


def made_up(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 3:
        return rng.choice(['a"b', "\\", '\\"', ",[{:" * 9, 1, None, True, "", "é"])
    if kind < 5:
        return [made_up(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f"{rng.choice(['k', ':,'])}{index}": made_up(rng, depth + 1) for index in range(rng.randrange(4))}


@pytest.mark.parametrize("piece_bytes", [5, 2**20])
def test_the_count_is_never_too_small_and_never_far_too_large(piece_bytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_size, "PIECE_BYTES", piece_bytes)
    rng = random.Random(0)
    for _ in range(300):
        value = made_up(rng)
        text, number = json.dumps(value).encode(), number_of(value)
        assert holds_more(text, number - 2, VALUES), text  # the first value stands behind none
        assert not holds_more(text, 3 * number, VALUES), text
        assert holds_more(text, lists_of(value) - 1, b"[{"), text
        assert not holds_more(text, lists_of(value), b"[{"), text
