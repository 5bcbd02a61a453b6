"""AdamW in one launch against AdamW by torch's operations: the same numbers to rounding, the same account of them. With
moments in 8 bits, too, whose codes are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.ops.unseen_bits import with_unseen_bits
from tandem.optim.adamw import AdamW
from tandem.optim.adamw_8bit import AdamW8bit
from tandem.optim.master_weights import Float32, Master, SplitMaster
from tandem.optim.optimizer import Optimizer
from tandem.spec.optim import AdamW8bitSpec, AdamWSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

Values = dict[str, Tensor]

SHAPES = [(1,), (7,), (3, 5), (1024,), (1000, 33), (8192,), (8193,), (300, 4096), (33, 256), (2, 3, 4), (4, 8, 512)]


class Operations(AdamW):
    def why_not_whole(self, live: Tensor) -> str:
        return "it is what the kernel is compared with"


class Operations8bit(AdamW8bit):
    def why_not_whole(self, live: Tensor) -> str:
        return "it is what the kernel is compared with"


KINDS: dict[str, tuple[Any, Any]] = {
    "adamw": (AdamW(AdamWSpec()), Operations(AdamWSpec())),
    "adamw_8bit": (AdamW8bit(AdamW8bitSpec()), Operations8bit(AdamW8bitSpec())),
}


def made(rule: Any, exact: Values, *, split: bool, decay: float) -> tuple[Optimizer, Values, Master]:
    master = SplitMaster() if split else Float32()
    live = {name: master.adopt(name, tensor.clone()) for name, tensor in exact.items()}
    return Optimizer(list(live.items()), dict.fromkeys(live, rule), master, weight_decay=decay), live, master


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_their_account(kind: str, split: bool, dtype: torch.dtype, decay: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [shape for shape in SHAPES if kind == "adamw" or shape != (1000, 33)]
    exact = {str(i): torch.randn(shape, generator=generator, device="cuda") * 0.02 for i, shape in enumerate(shapes)}
    ours, our_live, our_master = made(KINDS[kind][0], exact, split=split, decay=decay)
    theirs, their_live, their_master = made(KINDS[kind][1], exact, split=split, decay=decay)
    assert not any(ours.why_not_whole(name, tensor) for name, tensor in our_live.items())
    assert all(theirs.why_not_whole(name, tensor) for name, tensor in their_live.items())
    for step in range(6):
        grads: Values = {}
        for name, each in exact.items():
            grad = torch.randn(each.shape, generator=generator, device="cuda").to(dtype)
            grads[name] = grad * (torch.rand(each.shape, generator=generator, device="cuda") > 0.3)
        if step == 3:
            del grads["4"]
        ours.update({name: grad.clone() for name, grad in grads.items()}, 1e-4, 0.7)
        theirs.update({name: grad.clone() for name, grad in grads.items()}, 1e-4, 0.7)
        got, want = ours.drain_metrics(), theirs.drain_metrics()
        assert got.keys() == want.keys()
        for key, value in want.items():
            # How many moved depends on the last bit of each: one number more or less of those that hardly move.
            assert got[key] == pytest.approx(value, rel=1e-3, abs=1e-9), key
    their_state = theirs.state()
    for name, tensor in ours.state().items():
        if tensor.dtype == torch.uint8:  # a last bit decides at a bound
            assert (tensor != their_state[name]).float().mean() < 1e-3, name
        elif not name.endswith(("|master", "|step")):
            atol = 3e-7 * float(tensor.abs().max())  # sums of opposite signs keep the rounding of their terms
            torch.testing.assert_close(tensor, their_state[name], rtol=1e-5, atol=atol)
    for name in exact:
        mine, others = our_master.read(name, our_live[name]), their_master.read(name, their_live[name])
        apart = (mine - others).abs()
        # A thousandth of an update; or, after a moment was coded as its neighbour, a tenth away, of one.
        assert (apart > 1e-7).float().mean() <= (1e-3 if kind == "adamw_8bit" else 0), name
        assert apart.max() <= (2e-5 if kind == "adamw_8bit" else 1e-7), name


def test_memory_with_gaps_and_unaligned_memory() -> None:
    room = torch.zeros(64, 65, device="cuda")
    live = {"gaps": room[:, :64], "odd": torch.zeros(4097, device="cuda")[1:]}
    optimizer = Optimizer(list(live.items()), dict.fromkeys(live, AdamW(AdamWSpec())), Float32())
    assert optimizer.why_not_whole("gaps", live["gaps"]) == "its memory has gaps"
    assert not optimizer.why_not_whole("odd", live["odd"])
    optimizer.update({name: torch.ones_like(each) for name, each in live.items()}, 1e-3)
    for each in live.values():
        torch.testing.assert_close(each, torch.full_like(each, -1e-3))
    assert float(room[:, 64].abs().max()) == 0


def test_rows_that_are_not_of_whole_blocks_go_by_operations() -> None:
    live = {"x": torch.zeros(200, 33, device="cuda")}
    optimizer = Optimizer(list(live.items()), {"x": AdamW8bit(AdamW8bitSpec())}, Float32())
    assert "not of whole blocks" in optimizer.why_not_whole("x", live["x"])
    optimizer.update({"x": torch.ones(200, 33, device="cuda")}, 1e-3)
    torch.testing.assert_close(live["x"], torch.full_like(live["x"], -1e-3))


def test_a_second_step_goes_on_from_the_first_ones_state() -> None:
    live = {"x": torch.zeros(9000, device="cuda")}
    optimizer = Optimizer(list(live.items()), {"x": AdamW(AdamWSpec())}, Float32())
    optimizer.update({"x": torch.ones(9000, device="cuda")}, 1e-3)
    optimizer.update({"x": -torch.ones(9000, device="cuda")}, 1e-3)
    torch.testing.assert_close(live["x"], torch.full_like(live["x"], -1e-3 - 1e-3 * (0.9 * 0.1 - 0.1) / (1 - 0.81)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lower_bits_that_weights_begin_with_are_those_of_a_cpu(shape: tuple[int, ...]):
    weights = torch.randn(shape).bfloat16().float()
    assert torch.equal(with_unseen_bits("w", weights.cuda()).cpu(), with_unseen_bits("w", weights))
