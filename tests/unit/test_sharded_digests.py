"""Shards of tensors on several workers: together the whole tensor, and each digest in its place."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.vllm.weight_update import Tiling
from tandem.errors import SyncError
from tandem.ops import digest

SHAPES = {"a": [4, 6], "b": [3]}


def pieces_of(a: torch.Tensor, b: torch.Tensor) -> tuple[list[list[object]], list[str]]:
    """As two workers hold them: `a` by rows, `b` both."""
    parts = [("a", 0, 2), ("b", 0, 3), ("a", 2, 4), ("b", 0, 3)]
    cols = {"a": 6, "b": 1}
    numbers = [digest.piece({"a": a, "b": b}[name][top:bottom], name, top) for name, top, bottom in parts]
    return [[name, top, bottom, 0, cols[name]] for name, top, bottom in parts], digest.texts(numbers)


def test_digests_of_a_version_are_those_of_whole_tensors_again_and_again():
    boxes, _ = pieces_of(torch.zeros(4, 6), torch.zeros(3))
    tiling = Tiling(boxes, SHAPES)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(4, 6, generator=generator), torch.randn(3, generator=generator)
        assert tiling.fingerprints(pieces_of(a, b)[1]) == digest.fingerprints({"a": a, "b": b})


def test_workers_that_hold_one_piece_hold_the_same():
    boxes, digests = pieces_of(torch.ones(4, 6), torch.ones(3))
    with pytest.raises(SyncError, match="serve different weights as 'b'"):
        Tiling(boxes, SHAPES).fingerprints([*digests[:3], digest.text(int(digests[3], 16) + 1)])


def test_a_digest_too_few_is_none_of_the_others():
    boxes, digests = pieces_of(torch.ones(4, 6), torch.ones(3))
    with pytest.raises(ValueError, match="shorter"):
        Tiling(boxes, SHAPES).fingerprints(digests[:3])


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([["a", 0, 3, 0, 6], ["b", 0, 3, 0, 1]], "18 elements of 'a', which has 24"),
        ([["a", 0, 3, 0, 6], ["a", 2, 3, 0, 6], ["b", 0, 3, 0, 1]], "24 elements of 'a', which has 24"),
        ([["a", 0, 4, 0, 6]], "'b' is served by no worker"),
        ([["a", 0, 4, 0, 6], ["b", 0, 3, 0, 1], ["c", 0, 1, 0, 1]], "'c' is served by no worker, or by one that"),
    ],
)
def test_what_is_not_the_whole_once_is_refused(pieces: list[list[object]], why: str):
    with pytest.raises(SyncError, match=why):
        Tiling(pieces, SHAPES)
