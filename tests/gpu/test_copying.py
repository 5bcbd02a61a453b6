"""Many copies at once give what one after the other does, on whatever there is."""

from __future__ import annotations

import pytest
import torch

from tandem.ops import copying
from tandem.ops.copying import copy_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


def test_every_pair_is_copied_whatever_its_size_type_and_layout() -> None:
    torch.manual_seed(0)
    whole = torch.zeros(64, 48, device=DEVICE)
    sources = [
        torch.randn(16, 48, device=DEVICE),
        torch.randn(16, 48, device=DEVICE).bfloat16(),
        torch.randn(48, 16, device=DEVICE).t(),
        torch.randn(16, 48),
    ]
    pairs = [(whole[16 * n : 16 * n + 16], source) for n, source in enumerate(sources)]
    large = torch.empty(copying._SMALL_BYTES // 2, device=DEVICE)
    pairs.append((large, torch.arange(large.numel(), device=DEVICE, dtype=torch.float32)))
    pairs.append((torch.empty((), dtype=torch.bfloat16, device=DEVICE), torch.tensor(2.5, device=DEVICE)))
    copy_all(pairs)
    for into, source in pairs:
        assert torch.equal(into.float().cpu(), source.float().cpu())
