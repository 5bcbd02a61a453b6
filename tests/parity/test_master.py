"""16-bit weights that lose nothing: against float32, bit by bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.optim import master_weights as masters
from tandem.optim.adamw import AdamW
from tandem.optim.master_weights import Fp32Copy, InPlace, SplitMaster, Stochastic, round_half_away
from tandem.optim.optimizer import Optimizer
from tandem.optim.update_rule import ByParts
from tandem.spec.optim import AdamWSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def every_kind_of_float() -> Tensor:
    """All exponents, both signs, halves exactly and a hair beside them, subnormals, zeros, the largest."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 200_000, dtype=np.uint32)
    high = generator.integers(0, 2**16, 20_000, dtype=np.uint32) << 16
    near = [high | low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    values = np.concatenate([bits, *near]).view(np.float32)
    finite = values[np.isfinite(values) & (np.abs(values) < 3.3e38)]
    return torch.from_numpy(np.concatenate([finite, np.float32([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0])]))


def nearest_bf16(value: float) -> float:
    """The nearer of the two neighbours, the one further from zero if both are as near; in exact arithmetic."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF0000
    below = struct.unpack("<f", struct.pack("<I", bits))[0]
    above = struct.unpack("<f", struct.pack("<I", (bits + 0x10000) & 0xFFFFFFFF))[0]
    return below if abs(value - below) < abs(above - value) else above


def test_live_weights_are_rounded_to_nearest_with_ties_away_from_zero() -> None:
    exact = every_kind_of_float()
    live = SplitMaster().adopt("w", exact)
    sample = torch.randperm(len(exact), generator=torch.Generator().manual_seed(0))[:20_000]
    for value, found in zip(exact[sample].tolist(), live.float()[sample].tolist(), strict=True):
        assert found == nearest_bf16(value), value
    ties = torch.tensor([1 + 2**-8, -(1 + 2**-8), 1 + 3 * 2**-8])
    assert SplitMaster().adopt("t", ties).tolist() == [1 + 2**-7, -(1 + 2**-7), 1 + 2**-6]


def test_the_two_halves_are_the_float32_value_to_the_bit() -> None:
    exact = every_kind_of_float()
    split = SplitMaster()
    live = split.adopt("w", exact)
    assert live.dtype == torch.bfloat16
    assert split.state()["w"].dtype == torch.int16
    assert torch.equal(split.read("w", live).view(torch.int32), exact.view(torch.int32))
    again = exact.flip(0).contiguous()
    split.write("w", live, ..., again, 1)
    assert torch.equal(split.read("w", live).view(torch.int32), again.view(torch.int32))


def test_a_strided_view_of_foreign_memory_is_trained_in_place() -> None:
    """q, k and v are slices of one fused tensor that an engine owns; here even columns of it."""
    fused = torch.zeros(6, 8, dtype=torch.bfloat16)
    view = fused[1:5, ::2]
    exact = torch.randn(4, 4)
    split = SplitMaster()
    view.copy_(split.adopt("w", exact))
    optimizer = Optimizer([("w", view)], {"w": AdamW(AdamWSpec())}, split)
    alone = exact.clone()
    reference = Optimizer([("w", alone)], {"w": AdamW(AdamWSpec())}, masters.Float32())
    for step in range(5):
        gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        for each in (optimizer, reference):
            each.update({"w": gradient.clone()}, lr=1e-3)
    assert torch.equal(split.read("w", view), alone)
    assert torch.equal(fused[1:5, ::2], SplitMaster().adopt("w", alone))
    untouched = torch.ones(6, 8, dtype=torch.bool)
    untouched[1:5, ::2] = False
    assert not fused[untouched].any()


def test_stochastic_rounding_is_right_on_average_and_the_same_again() -> None:
    value = torch.full((200_000,), 1 + 0.3 * 2**-7)  # three tenths of the way between two neighbours
    live = torch.ones(200_000, dtype=torch.bfloat16)
    Stochastic(7).write("w", live, ..., value, 1)
    assert set(live.tolist()) == {1.0, 1 + 2**-7}
    assert (live.float() - 1).mean().item() / 2**-7 == pytest.approx(0.3, abs=0.005)
    again, later, other = (torch.ones_like(live) for _ in range(3))
    Stochastic(7).write("w", again, ..., value, 1)
    Stochastic(7).write("w", later, ..., value, 2)
    Stochastic(7).write("v", other, ..., value, 1)
    assert torch.equal(again, live)
    assert not torch.equal(later, live)
    assert not torch.equal(other, live)


def test_stochastic_rounding_leaves_alone_what_bf16_can_hold() -> None:
    value = torch.randn(1000).bfloat16().float()
    live = torch.zeros(1000, dtype=torch.bfloat16)
    Stochastic(0).write("w", live, ..., value, 1)
    assert torch.equal(live.float(), value)


# --- 200 steps of a model


class TwoLayers(torch.nn.Module):
    """Gradients that depend on the weights: what is lost changes what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def train(
    master: Any, lr: float, steps: int = 200
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """What is served, what is exact, and the metrics of each step."""
    torch.manual_seed(0)
    model = TwoLayers()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    for name, parameter in model.named_parameters():
        parameter.data = master.adopt(name, parameter.data)
    dtype = next(model.parameters()).dtype
    named = list(model.named_parameters())
    rule = AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, master, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    metrics = []
    for _ in range(steps):
        x, y = (torch.randn(32, 16, generator=generator).to(dtype) for _ in range(2))
        loss = (model(x) - y).float().square().mean()
        gradients = dict(zip((name for name, _ in named), torch.autograd.grad(loss, model.parameters()), strict=True))
        optimizer.update(gradients, lr)
        metrics.append(optimizer.drain_metrics())
    served = {name: tensor.detach().clone() for name, tensor in named}
    exact = {name: master.read(name, tensor).clone() for name, tensor in named}
    return served, exact, metrics


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-3])
def test_two_hundred_steps_of_split_are_those_of_a_float32_copy_to_the_bit(lr: float) -> None:
    split, copy = train(SplitMaster(), lr), train(Fp32Copy(), lr)
    for ours, theirs in zip(split[:2], copy[:2], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert split[2] == copy[2]
    assert all(each["update/lost_energy"] == 0 for each in split[2])
    assert all(each["update/effective_fraction"] > 0.99 for each in split[2])


@pytest.mark.parametrize(("lr", "lost"), [(1e-6, 0.97), (3e-6, 0.91), (1e-5, 0.73), (3e-5, 0.31), (1e-4, 0.01)])
def test_the_share_of_a_gaussian_update_that_rounding_in_place_loses(lr: float, lost: float) -> None:
    """Weights N(0, 0.02), update N(0, 1) lr."""

    class Gaussian(ByParts):
        by_rows = True

        def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
            return {}

        def update(self, slots: Any) -> None:
            for slot in slots:
                slot.value.sub_(slot.grad, alpha=slot.lr)

    generator = torch.Generator().manual_seed(0)
    live = (torch.randn(1_000_000, generator=generator) * 0.02).bfloat16()
    optimizer = Optimizer([("w", live)], {"w": Gaussian()}, InPlace())
    optimizer.update({"w": torch.randn(1_000_000, generator=generator)}, lr)
    assert optimizer.drain_metrics()["update/lost_energy"] == pytest.approx(lost, abs=0.02)


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_in_place_loses_most_of_each_adamw_update_and_says_so(lr: float) -> None:
    metrics = train(InPlace(), lr)[2]
    assert sum(each["update/lost_energy"] for each in metrics) / len(metrics) > 0.9
    assert metrics[0]["update/effective_fraction"] < 0.5


def way(found: dict[str, Tensor], start: dict[str, Tensor]) -> Tensor:
    return torch.cat([(found[name].float() - start[name].float()).flatten() for name in start])


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_only_rounding_in_place_goes_another_way_than_float32(lr: float) -> None:
    """The share of the way that 200 steps of float32 went: all of it, most of it with noise, little of it."""
    start, goal = (train(Fp32Copy(), lr, steps)[1] for steps in (0, 200))
    wanted = way(goal, start)

    def share(exact: dict[str, Tensor]) -> float:
        return (way(exact, start) @ wanted / (wanted @ wanted)).item()

    start_split = train(SplitMaster(), lr, 0)[1]
    assert all(torch.equal(start_split[name], start[name]) for name in start)
    assert share(train(SplitMaster(), lr)[1]) == pytest.approx(1.0, abs=1e-6)
    noise = 0.5 if lr < 5e-6 else 0.15  # a last bit is hundreds of updates
    assert share(train(Stochastic(3), lr)[1]) == pytest.approx(1.0, abs=noise)
    assert share(train(InPlace(), lr)[1]) < 0.6


def test_the_bits_that_round_half_away_leaves_are_a_signed_half() -> None:
    value = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-9, -(1 + 2**-9)])
    high, low = round_half_away(value)
    assert (high.dtype, low.dtype) == (torch.int16, torch.int16)
    assert low.tolist() == [0, -0x8000, 0x4000, 0x4000]
