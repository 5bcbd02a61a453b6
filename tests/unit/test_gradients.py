"""Gradients summed over micro-batches, and gradients that are used up as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trainers import PlainDescent

from tandem.optim import master_weights as masters
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.optim.update_rule import Slot
from tandem.spec.optim import AdamWSpec
from tandem.train.gradient_release import Collected, Released

pytestmark = pytest.mark.usefixtures("one_thread")


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)


def named(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters())


def loss(module: torch.nn.Module, seed: int) -> Tensor:
    dtype = next(module.parameters()).dtype
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return module(x).float().square().sum()


def optimizer_of(module: torch.nn.Module, rule: Any) -> Optimizer:
    return Optimizer(named(module), {name: rule for name, _ in named(module)}, masters.Float32())


def test_bf16_gradients_of_many_micro_batches_are_summed_in_float32() -> None:
    """A thousand micro-batches whose gradient is 2**-9 of the first one's: bf16 sums would not move at all."""
    weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    collected = Collected([("w", weight)])
    with collected.collecting(1001):
        (weight.float() * 1.0).sum().backward()
        for _ in range(1000):
            (weight.float() * 2**-9).sum().backward()
    found = collected.take()["w"]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1 + 1000 * 2**-9)
    assert weight.grad is None


def test_one_micro_batch_keeps_its_gradients_as_they_are() -> None:
    module = network(torch.bfloat16)
    collected = Collected(named(module))
    with collected.collecting(1):
        loss(module, 1).backward()
    taken = collected.take()
    assert {gradient.dtype for gradient in taken.values()} == {torch.bfloat16}
    assert taken.keys() == dict(named(module)).keys()
    assert collected.take() == {}
    assert all(tensor.grad is None for _, tensor in named(module))


def test_a_step_leaves_no_hook_behind() -> None:
    """The next stage has an optimizer of its own; a hook of this one would train twice."""
    module = network()
    optimizer = optimizer_of(module, PlainDescent())
    with Released(named(module), optimizer, 1.0).releasing(lr=0.1):
        pass
    with Collected(named(module)).collecting(3):
        pass
    before = {name: tensor.detach().clone() for name, tensor in named(module)}
    loss(module, 1).backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in named(module))
    assert all(tensor.grad is not None for _, tensor in named(module))


@pytest.mark.parametrize("rule", [PlainDescent(), AdamW(AdamWSpec())], ids=["descent", "adamw"])
def test_release_without_a_clip_is_the_plain_step_to_the_bit(rule: Any) -> None:
    plain, released = network(), network()
    optimizers = [optimizer_of(module, rule) for module in (plain, released)]
    release = Released(named(released), optimizers[1], clip_norm=1e9)
    for seed in range(5):
        collected = Collected(named(plain))
        with collected.collecting(1):
            loss(plain, seed).backward()
        optimizers[0].update(collected.take(), lr=0.01)
        with release.releasing(lr=0.01):
            loss(released, seed).backward()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named(plain), named(released), strict=True))


def test_gradients_never_exist_together() -> None:
    """As each comes, no other parameter holds one."""
    module = network()
    seen: list[int] = []

    class Watching(PlainDescent):
        def update(self, slots: Sequence[Slot]) -> None:
            seen.append(sum(tensor.grad is not None for _, tensor in named(module)))
            super().update(slots)

    release = Released(named(module), optimizer_of(module, Watching()), clip_norm=1e9)
    with release.releasing(lr=0.01):
        loss(module, 1).backward()
    assert seen == [0, 0, 0, 0]
    assert release.largest_bytes == 4 * 16 * 8


def test_a_tied_weight_is_moved_once_by_the_sum_of_its_gradients() -> None:
    table = torch.nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))

    def use() -> Tensor:
        return (torch.nn.functional.embedding(torch.tensor([1, 2]), table) @ table.T).square().sum()

    expected = table.detach() - 0.01 * torch.autograd.grad(use(), table)[0]
    optimizer = Optimizer([("table", table)], {"table": PlainDescent()}, masters.Float32())
    with Released([("table", table)], optimizer, clip_norm=1e9).releasing(lr=0.01):
        use().backward()
    assert torch.equal(table.detach(), expected)
    assert int(optimizer.state()["table|step"]) == 1


def test_the_clip_goes_by_earlier_steps_and_by_this_one_so_far() -> None:
    """Two parameters, gradients 3 and then 4 (their norm: 5)."""
    first, last = (torch.zeros(1, requires_grad=True) for _ in range(2))
    parameters = [("first", first), ("last", last)]
    optimizer = Optimizer(parameters, {"first": PlainDescent(), "last": PlainDescent()}, masters.Float32())
    release = Released(parameters, optimizer, clip_norm=1.0)

    def step() -> tuple[float, float]:
        before = first.item(), last.item()
        with release.releasing(lr=1.0):
            (3 * first).backward()
            (4 * last).backward()
        return before[0] - first.item(), before[1] - last.item()

    assert step() == pytest.approx((3 / 3, 4 / 5), rel=1e-5), "nothing known yet but what has been seen"
    assert release.metrics()["grad/norm"] == pytest.approx(5.0)
    assert step() == pytest.approx((3 / 5, 4 / 5), rel=1e-5), "as the plain clip"


def test_a_gradient_that_is_not_finite_leaves_its_own_parameter_as_it_was() -> None:
    module = network()
    optimizer = optimizer_of(module, PlainDescent())
    release = Released(named(module), optimizer, clip_norm=1e9)
    before = {name: tensor.detach().clone() for name, tensor in named(module)}
    handle = module[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with release.releasing(lr=0.01):
        loss(module, 1).backward()
    handle.remove()
    moved = {name for name, tensor in named(module) if not torch.equal(tensor, before[name])}
    assert moved == {"0.bias", "2.weight", "2.bias"}
    assert release.metrics()["release/skipped"] == 1
    assert release.running_norm == 0.0, "a norm that lacks a part is no norm"
