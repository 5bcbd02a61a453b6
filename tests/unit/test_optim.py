"""The optimizer around the rules: which weights it moves, by how much, and what it says about it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.optim import master_weights as masters
from tandem.optim import optimizer as optimizers
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.spec.optim import AdamWSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def make(
    named: list[tuple[str, Tensor]], spec: AdamWSpec | None = None, master: Any = None, **options: Any
) -> Optimizer:
    rule = AdamW(spec or AdamWSpec())
    return Optimizer(named, {name: rule for name, _ in named}, master or masters.Float32(), **options)


def randoms(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


SHAPES = {"table": (7, 3), "matrix": (5, 4), "vector": (6,), "scalar": ()}


def test_weight_decay_is_for_matrices_only() -> None:
    named = randoms(SHAPES, 0)
    before = {name: tensor.clone() for name, tensor in named.items()}
    optimizer = make(list(named.items()), weight_decay=0.5)
    optimizer.update({name: torch.zeros_like(tensor) for name, tensor in named.items()}, lr=0.1)
    for name, tensor in named.items():
        torch.testing.assert_close(tensor, before[name] * (1 - 0.1 * 0.5 if tensor.ndim >= 2 else 1.0))


def test_adamw_is_torchs_own_over_fifty_steps_with_gradients_missing_now_and_then() -> None:
    ours, theirs = randoms(SHAPES, 1), randoms(SHAPES, 1)
    spec = AdamWSpec(betas=(0.8, 0.9), eps=1e-6)
    optimizer = make(list(ours.items()), spec, weight_decay=0.1)
    groups = [
        {"params": [tensor for tensor in theirs.values() if tensor.ndim >= 2], "weight_decay": 0.1},
        {"params": [tensor for tensor in theirs.values() if tensor.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.9), eps=1e-6)
    for step in range(50):
        gradients = randoms(SHAPES, 100 + step)
        if step % 3 == 1:
            del gradients["matrix"]
        for group in reference.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for name, tensor in theirs.items():
            tensor.grad = gradients[name].clone() if name in gradients else None
        reference.step()
        optimizer.update(gradients, lr=0.01 / (1 + step))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name].detach(), atol=1e-6, rtol=1e-5)


def test_a_large_matrix_by_rows_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (2**26, 8):
        monkeypatch.setattr(optimizers, "CHUNK", chunk)
        named = randoms(SHAPES, 2)
        optimizer = make(list(named.items()))
        for step in range(3):
            optimizer.update(randoms(SHAPES, step), lr=0.1, scale=0.5)
        found.append((named, optimizer.drain_metrics()))
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in SHAPES)
    assert found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_was_used_is_gone_while_the_next_ones_are(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Else all of them and what an update needs beside them would be held together."""
    monkeypatch.setattr(optimizers, "CHUNK", 8)
    named = {name: torch.zeros(2, 4, dtype=dtype) for name in "abc"}
    left: list[set[str]] = []

    class Looking(AdamW):
        def update(self, slots: Any) -> None:
            left.append({name for name, gradient in alive.items() if gradient() is not None})
            super().update(slots)

    rule = Looking(AdamWSpec())
    optimizer = Optimizer(list(named.items()), dict.fromkeys(named, rule), masters.InPlace())
    gradients = {name: torch.ones_like(tensor) for name, tensor in named.items()}
    alive = {name: weakref.ref(gradient) for name, gradient in gradients.items()}
    optimizer.update(gradients, lr=0.1)
    assert not gradients
    assert len(left) == 3
    assert all("a" not in names for names in left[1:])
    assert "b" not in left[2]


def test_lora_plus_moves_the_b_matrices_by_its_factor() -> None:
    named = {"A": torch.zeros(3, 2), "B": torch.zeros(2, 3)}
    optimizer = make(list(named.items()), lr_scale={"B": 16.0})
    optimizer.update({name: torch.ones_like(tensor) for name, tensor in named.items()}, lr=0.001)
    torch.testing.assert_close(named["A"], torch.full((3, 2), -0.001))
    torch.testing.assert_close(named["B"], torch.full((2, 3), -0.016))


def test_what_became_of_an_update_is_counted() -> None:
    """Four numbers: one without a gradient, one that moves, two whose update is smaller than half their last bit."""
    live = torch.tensor([[1.0, 0.001, 1.0, 1.0]], dtype=torch.bfloat16)
    optimizer = make([("w", live)], AdamWSpec(eps=1e-30), masters.InPlace())
    optimizer.update({"w": torch.tensor([[0.0, 1.0, 1.0, -1.0]])}, lr=1e-3)
    metrics = optimizer.drain_metrics()
    assert metrics["update/effective_fraction"] == pytest.approx(1 / 3)
    assert metrics["update/lost_energy"] == pytest.approx(2 / 3, abs=0.01)
    assert metrics["update/served_fraction"] == pytest.approx(1 / 4)
    assert metrics["update/norm"] == pytest.approx(3**0.5 * 1e-3, rel=0.01)
    assert optimizer.drain_metrics() == {}, "counted once"


def test_state_of_another_model_or_precision_is_refused_by_name() -> None:
    optimizer = make([("a", torch.zeros(2, 2))])
    state = optimizer.state()
    with pytest.raises(CheckpointError, match=r"1 entries .* 'b\|step'"):
        optimizer.load({**state, "b|step": torch.tensor(0)})
    split = masters.SplitMaster()
    live = split.adopt("a", torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match=r"'a\|master'"):
        make([("a", live)], master=split).load(state)


@pytest.mark.parametrize("cut", [lambda whole: whole.T, lambda whole: whole[:, :3]], ids=["transposed", "columns"])
def test_a_value_with_strides_is_moved_as_a_contiguous_one(cut: Any) -> None:
    whole = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    before, strided = whole.clone(), cut(whole)
    contiguous = strided.clone(memory_format=torch.contiguous_format)
    for value in (strided, contiguous):
        optimizer = make([("w", value)])
        for step in range(3):
            optimizer.update(randoms({"w": tuple(value.shape)}, step), lr=0.1)
    torch.testing.assert_close(strided, contiguous)
    assert torch.equal(whole[:, 3:], before[:, 3:]) or strided.shape == (5, 5), "and nothing beside it"
