"""AdamW's moments in the host's memory: the same bits, whichever stream is late, in bounded device memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tandem.optim.adamw import AdamW
from tandem.optim.adamw_offload import AdamWOffload, why_not
from tandem.optim.update_rule import Slot, UpdateRule
from tandem.spec.optim import AdamWOffloadSpec, AdamWSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

Values = dict[str, Tensor]

MIB = 2**20
LATE = 10_000_000
"""Clock cycles, some 6 ms: many times a piece's copy."""

SHAPES = [(1,), (1000,), (3, 5), (1024, 1024), (2**22,), (2**22 + 1,), (5, 2**21 + 3), (3000, 4097), (4, 700, 900)]


def weights(shapes: list[tuple[int, ...]]) -> Values:
    generator = torch.Generator("cuda").manual_seed(0)
    return {str(i): torch.randn(shape, generator=generator, device="cuda") for i, shape in enumerate(shapes)}


def slots(values: Values, state: dict[str, Values], step: int) -> Iterator[Slot]:
    generator = torch.Generator("cuda").manual_seed(step)
    for name, value in values.items():
        grad = torch.randn(value.shape, generator=generator, device="cuda")
        yield Slot(name, value, grad, state[name], step, 1e-3, 0.1)


def run(rule: UpdateRule, values: Values, steps: int, every: int = 99) -> tuple[Values, dict[str, Values]]:
    """Updates of `every` parameters at a time."""
    state = {name: rule.init(name, value) for name, value in values.items()}
    for step in range(1, steps + 1):
        of_step = list(slots(values, state, step))
        for first in range(0, len(of_step), every):
            rule.update(of_step[first : first + every])
    torch.cuda.synchronize()
    return values, state


def assert_same_bits(ours: tuple[Values, dict[str, Values]], theirs: tuple[Values, dict[str, Values]]) -> None:
    for name, value in ours[0].items():
        assert torch.equal(value, theirs[0][name]), f"parameter {name} differs"
        for moment, tensor in ours[1][name].items():
            assert torch.equal(tensor.cpu(), theirs[1][name][moment].cpu()), f"{moment} of parameter {name} differs"


@pytest.mark.parametrize("every", [1, 4, 99])
def test_twenty_steps_have_adamws_bits(every: int) -> None:
    rule = AdamWOffload(AdamWOffloadSpec())
    ours = run(rule, weights(SHAPES), 20, every=every)
    assert why_not(torch.device("cuda")) == ""
    assert all(moment.is_pinned() for state in ours[1].values() for moment in state.values())
    assert_same_bits(ours, run(AdamW(AdamWSpec()), weights(SHAPES), 20))


@pytest.mark.parametrize("which", ["incoming", "current", "outgoing"])
@pytest.mark.parametrize("shapes", [[(1024, 1024)], [(2**22,)] * 2, SHAPES], ids=["one-piece", "two-pieces", "many"])
def test_the_bits_are_the_same_when_one_stream_is_late(which: str, shapes: list[tuple[int, ...]]) -> None:
    rule = AdamWOffload(AdamWOffloadSpec())
    rule.init("first", torch.zeros(1, device="cuda"))
    line = rule._line
    assert line is not None
    late = {"incoming": line.incoming, "current": torch.cuda.current_stream(), "outgoing": line.outgoing}[which]
    rule._adamw = LateAdamW(late)
    ours = run(rule, weights(shapes), 4, every=2)
    assert_same_bits(ours, run(AdamW(AdamWSpec()), weights(shapes), 4))


class LateAdamW(AdamW):
    """Keeps a stream busy before each piece is computed."""

    def __init__(self, late: torch.cuda.Stream) -> None:
        super().__init__(AdamWSpec())
        self._late = late

    def update(self, slots: Sequence[Slot]) -> None:
        with torch.cuda.stream(self._late):
            torch.cuda._sleep(LATE)
        super().update(slots)


def test_the_device_holds_three_pieces_and_no_state() -> None:
    values = weights([(2**25,), (2**24, 2)])  # moments: 512 MiB
    rule = AdamWOffload(AdamWOffloadSpec())
    before = torch.cuda.memory_allocated()
    state = {name: rule.init(name, value) for name, value in values.items()}
    grads = {name: torch.ones_like(value) for name, value in values.items()}
    of_step = [Slot(n, v, grads[n], state[n], 1, 1e-3, 0.0) for n, v in values.items()]
    of_grads = sum(grad.nbytes for grad in grads.values())
    torch.cuda.reset_peak_memory_stats()
    rule.update(of_step)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - of_grads <= 97 * MIB


def test_an_update_does_not_wait_for_the_device() -> None:
    values = weights([(2**23,)] * 4)
    rule = AdamWOffload(AdamWOffloadSpec())
    state = {name: rule.init(name, value) for name, value in values.items()}
    rule.update(list(slots(values, state, 1)))
    of_step = list(slots(values, state, 2))
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        rule.update(of_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_and_updates_overlap() -> None:
    """Both directions of the link at once: a step takes less than its copies one after another."""
    values = weights([(2**24,)] * 8)
    rule = AdamWOffload(AdamWOffloadSpec())
    state = {name: rule.init(name, value) for name, value in values.items()}
    of_step = list(slots(values, state, 1))
    room = torch.empty(2**22, device="cuda")

    def copies() -> None:
        for moments in state.values():
            for moment in moments.values():
                for piece in moment.split(2**22):
                    room.copy_(piece, non_blocking=True)
                    piece.copy_(room, non_blocking=True)

    def milliseconds(work: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        torch.cuda.synchronize()
        start.record()
        work()
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    assert milliseconds(lambda: rule.update(of_step)) < 0.8 * milliseconds(copies)


def test_a_value_of_odd_strides_is_updated_in_place() -> None:
    value, plain = weights([(300, 200)])["0"].t(), weights([(300, 200)])["0"].t().contiguous()
    for rule, of in ((AdamWOffload(AdamWOffloadSpec()), value), (AdamW(AdamWSpec()), plain)):
        run(rule, {"w": of}, 3)
    assert torch.equal(value, plain)
