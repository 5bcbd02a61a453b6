"""How much padding a pass of a hybrid's prompts may have."""

from __future__ import annotations

import pytest

from tandem.engine.hf.passes import most_padding


@pytest.mark.parametrize(
    ("device_kind", "parameters", "positions"),
    [
        ("cuda", 1_000_000_000, 6000),
        ("cuda", 7_000_000_000, 1428),
        ("cpu", 1_000_000_000, 32),
        ("cpu", 7_000_000_000, 32),
    ],
)
def test_a_pass_takes_as_much_padding_as_lasts_as_long_as_another_pass(
    device_kind: str, parameters: int, positions: int
) -> None:
    assert most_padding(device_kind, parameters) == positions
