"""The lower bits that 16-bit weights begin with: nobody sees them, and updates show sooner by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.model.cast_precision import narrow
from tandem.ops.parts import box_of_rank
from tandem.ops.unseen_bits import with_unseen_bits
from tandem.optim.master_weights import Fp32Copy, InPlace, SplitMaster, Stochastic, round_half_away


def pretrained(*shape: int) -> Tensor:
    """Weights of a bf16 checkpoint, in float32."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16().float()


@pytest.mark.parametrize("master", [SplitMaster(), Fp32Copy(), Stochastic(0), InPlace()])
def test_no_weight_that_computes_is_changed(master):
    weights = pretrained(300, 70)
    assert torch.equal(master.adopt("w", with_unseen_bits("w", weights)).float(), weights)
    assert torch.equal(weights, pretrained(300, 70))
    assert master.keeps_bits == bool(master.state())


def test_every_place_between_two_steps_is_as_likely():
    low = round_half_away(with_unseen_bits("w", pretrained(1000, 300)))[1].float()
    shares = torch.histc(low, 16, -(2**15), 2**15) / low.numel()
    assert 0.06 < shares.min() < shares.max() < 0.065
    for one, other in ((low[:, 1:], low[:, :-1]), (low[1:], low[:-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01
    another = round_half_away(with_unseen_bits("v", pretrained(1000, 300)))[1].float()
    assert abs(torch.corrcoef(torch.stack([low.flatten(), another.flatten()]))[0, 1]) < 0.01


def test_numbers_that_have_lower_bits_keep_them_and_zeros_stay():
    exact = (pretrained(64, 64).view(torch.int32) + 77).view(torch.float32)
    exact[:, 0] = 0.0
    assert torch.equal(with_unseen_bits("w", exact), exact)
    assert torch.equal(with_unseen_bits("w", torch.zeros(8)), torch.zeros(8))


@pytest.mark.parametrize("cut", ["rows", "cols", "whole"])
@pytest.mark.parametrize("shape", [(37, 24), (6, 5, 16), (41,)])
def test_pieces_have_the_bits_of_the_whole(cut, shape):
    weights = pretrained(*shape)
    whole = with_unseen_bits("w", weights).reshape(shape[0], -1)
    for rank in range(3):
        top, bottom, left, right = box = box_of_rank(shape, rank, 3, cut)
        piece = weights.reshape(shape[0], -1)[top:bottom, left:right]
        assert torch.equal(with_unseen_bits("w", piece, box), whole[top:bottom, left:right])


def test_many_rows_are_made_in_parts(monkeypatch: pytest.MonkeyPatch):
    weights = pretrained(50, 9)
    whole = with_unseen_bits("w", weights)
    monkeypatch.setattr("tandem.ops.unseen_bits.AT_ONCE", 40)
    assert torch.equal(with_unseen_bits("w", weights), whole)


def test_a_share_of_the_weights_shows_an_update_as_large_as_the_way_that_they_have_gone():
    """A hundredth and a third of the distance to the next bf16 number; without these bits none would show either."""
    module = torch.nn.Linear(400, 400, bias=False)
    module.weight.data = pretrained(400, 400)
    module.config = type("Config", (), {})()  # pyright: ignore[reportAttributeAccessIssue]
    split = SplitMaster()
    narrow(module, torch.device("cpu"), split.adopt)
    exact = split.read("weight", module.weight).view(torch.int32)
    before = module.weight.detach().clone()
    for share in (0.01, 1 / 3):
        split.write("weight", module.weight, ..., (exact + int(share * 2**16)).view(torch.float32), 1)
        assert (module.weight != before).float().mean().item() == pytest.approx(share, rel=0.1)
