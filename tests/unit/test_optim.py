from __future__ import annotations

import math

import pytest
import torch

from tandem.optim import adamw
from tandem.optim.schedule import lr_share
from tandem.spec.optim import AdamWSpec, ConstantSchedule, CosineSchedule, LinearSchedule, ScheduleSpec


def shares(spec: ScheduleSpec, steps: int) -> list[float]:
    return [lr_share(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ConstantSchedule(), [1, 1, 1, 1, 1]),
        (ConstantSchedule(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1]),
        (LinearSchedule(final=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (LinearSchedule(final=0.0, warmup_steps=1), [0.5, 1, 2 / 3, 1 / 3, 0]),
        (CosineSchedule(final=0.0), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        (CosineSchedule(final=0.1, warmup_steps=2), [1 / 3, 2 / 3, 1, 0.55, 0.1]),
    ],
    ids=lambda value: value.kind if hasattr(value, "kind") else "",
)
def test_a_schedule_has_these_values(spec: ScheduleSpec, expected: list[float]) -> None:
    assert shares(spec, len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [ConstantSchedule, LinearSchedule, CosineSchedule])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 6, 50])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_the_learning_rate_is_never_zero_by_accident_nor_above_its_peak(
    kind: type, warmup_steps: int, steps: int
) -> None:
    for share in shares(kind(warmup_steps=warmup_steps), steps):
        assert 0 < share <= 1


def test_weight_decay_is_for_matrices_only() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = adamw.make(list(module.named_parameters()), AdamWSpec(weight_decay=0.5), lr=0.1)
    before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    for tensor in module.parameters():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    shrunk = dict.fromkeys(("0.weight", "1.weight"), 1 - 0.1 * 0.5)
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.detach(), before[name] * shrunk.get(name, 1.0))


def test_every_parameter_is_in_one_group_with_the_settings_of_the_spec() -> None:
    module = torch.nn.Linear(3, 2)
    spec = AdamWSpec(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = adamw.make(list(module.named_parameters()), spec, lr=0.2)
    assert [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups] == [[(2, 3)], [(2,)]]
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.2, (0.8, 0.9), 1e-6, decay)


def test_adapters_without_a_vector_among_them_make_one_group() -> None:
    optimizer = adamw.make([("a", torch.zeros(2, 2, requires_grad=True))], AdamWSpec(), lr=0.1)
    assert len(optimizer.param_groups) == 1


def test_the_first_step_of_adamw_moves_each_weight_by_the_learning_rate() -> None:
    weight = torch.tensor([[1.0, -2.0]], requires_grad=True)
    optimizer = adamw.make([("w", weight)], AdamWSpec(), lr=0.01)
    weight.grad = torch.tensor([[3.0, -0.5]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.99, -1.99]]), atol=1e-6, rtol=0)
