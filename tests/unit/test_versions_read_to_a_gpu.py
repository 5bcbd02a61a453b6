"""Where the bytes of a version come to lie that is read straight to a GPU and served there."""

from __future__ import annotations

import pytest
import torch

from tandem.bridge.files.reader import aligned_behind


@pytest.mark.parametrize("head", [8, 24, 29_544, 4096])
def test_what_follows_a_files_header_begins_as_a_tensor_of_its_own_would(head: int):
    flat = aligned_behind(head, 10_000, torch.device("cpu"))
    assert (len(flat), flat.dtype) == (10_000, torch.uint8)
    assert (flat.storage_offset() + head) % 256 == 0
