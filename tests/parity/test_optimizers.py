"""What holds for every rule, and each rule against its reference."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.optim.adafactor import Adafactor
from tandem.optim.adamw import AdamW
from tandem.optim.adamw_8bit import AdamW8bit, Code
from tandem.optim.adamw_offload import AdamWOffload, why_not
from tandem.optim.apollo import Apollo
from tandem.optim.muon import Muon
from tandem.optim.update_rule import Slot, UpdateRule
from tandem.spec.optim import (
    AdafactorSpec,
    AdamW8bitSpec,
    AdamWOffloadSpec,
    AdamWSpec,
    ApolloMiniSpec,
    ApolloSpec,
    MuonSpec,
)

Tensors = dict[str, Tensor]
State = dict[str, Tensors]
Groups = list[dict[str, Any]]

DECAY = 0.1

MATRICES = {"wide": (24, 512), "padded": (70, 80), "tall": (300, 16), "experts": (4, 24, 80)}
EVERYTHING = MATRICES | {"norm": (96,), "bias": (5000,), "scalar": ()}


@dataclass(frozen=True)
class Case:
    rule: Callable[[], UpdateRule]
    shapes: Mapping[str, tuple[int, ...]]
    lr: float
    wide: int
    """Bytes of state for 24 x 512."""
    padded: int
    """And for 70 x 80."""


CASES = {
    "adamw": Case(lambda: AdamW(AdamWSpec()), EVERYTHING, 1e-3, 8 * 24 * 512, 8 * 70 * 80),
    "adamw_8bit": Case(lambda: AdamW8bit(AdamW8bitSpec()), EVERYTHING, 1e-3, 2 * 24 * (512 + 2 * 4), 2 * 70 * (80 + 4)),
    "adamw_offload": Case(lambda: AdamWOffload(AdamWOffloadSpec()), EVERYTHING, 1e-3, 8 * 24 * 512, 8 * 70 * 80),
    "adafactor": Case(lambda: Adafactor(AdafactorSpec()), EVERYTHING, 1e-2, 4 * (24 + 512), 4 * (70 + 80)),
    "muon": Case(lambda: Muon(MuonSpec()), MATRICES, 1e-3, 4 * 24 * 512, 4 * 70 * 80),
    "apollo": Case(
        lambda: Apollo(ApolloSpec(rank=4, refresh_every=7), seed=0),
        MATRICES,
        1e-3,
        4 * (2 * 4 * 512 + 2),
        4 * (2 * 4 * 80 + 2),
    ),
    "apollo_mini": Case(
        lambda: Apollo(ApolloMiniSpec(refresh_every=7), seed=0), MATRICES, 1e-3, 4 * (2 * 512 + 2), 4 * (2 * 80 + 2)
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def seeded(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def start(case: Case) -> Tensors:
    return {name: 0.1 * torch.randn(shape, generator=seeded("start", name)) for name, shape in case.shapes.items()}


def gradient(name: str, like: Tensor, step: int) -> Tensor:
    """A signal in the noise; another size every few steps, and rows of different sizes."""
    signal = torch.randn(like.shape, generator=seeded("signal", name))
    noise = torch.randn(like.shape, generator=seeded("noise", name, step))
    size = torch.rand(like.shape[:1] + (1,) * (like.ndim - 1), generator=seeded("rows", name)) + 0.1
    return (signal + noise) * size * (1 + step % 5)


def slots(values: Tensors, state: State, step: int, lr: float) -> Iterator[Slot]:
    for name, value in values.items():
        yield Slot(name, value, gradient(name, value, step), state[name], step, lr, DECAY if value.ndim > 1 else 0.0)


def run(case: Case, steps: Iterable[int], values: Tensors, state: State | None = None) -> tuple[Tensors, State]:
    rule = case.rule()
    state = state or {name: rule.init(name, value) for name, value in values.items()}
    for step in steps:
        rule.update(list(slots(values, state, step, case.lr)))
    return values, state


def assert_same_bits(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs by {(tensor - theirs[name]).abs().max():g}"


def through_safetensors(state: State, rule: UpdateRule, values: Tensors) -> State:
    file = safetensors.torch.save({f"{name}|{key}": t for name, each in state.items() for key, t in each.items()})
    fresh = {name: rule.init(name, value) for name, value in values.items()}
    for key, tensor in safetensors.torch.load(file).items():
        name, _, part = key.partition("|")
        assert fresh[name][part].dtype == tensor.dtype
        fresh[name][part].copy_(tensor)
    return fresh


def test_a_run_resumed_at_any_step_has_the_same_bits(case: Case) -> None:
    whole, state = run(case, range(1, 11), start(case))
    for stop in range(1, 10):
        values, halfway = run(case, range(1, stop + 1), start(case))
        resumed, again = run(case, range(stop + 1, 11), values, through_safetensors(halfway, case.rule(), values))
        assert_same_bits(resumed, whole)
        for name, tensors in state.items():
            assert_same_bits(again[name], tensors)


def test_the_state_is_plain_tensors(case: Case) -> None:
    _, state = run(case, range(1, 3), start(case))
    for tensor in (tensor for each in state.values() for tensor in each.values()):
        assert type(tensor) is Tensor
        assert tensor.dtype in (torch.float32, torch.uint8)
        assert tensor.is_contiguous()


def test_the_state_has_the_promised_bytes(case: Case) -> None:
    _, state = run(case, range(1, 3), start(case))
    found = [sum(tensor.nbytes for tensor in state[name].values()) for name in ("wide", "padded")]
    assert found == [case.wide, case.padded]


def test_bf16_parameters_have_the_same_state(case: Case) -> None:
    rule = case.rule()
    for name, value in start(case).items():
        fp32, bf16 = rule.init(name, value), rule.init(name, value.bfloat16())
        assert {key: (t.shape, t.dtype) for key, t in bf16.items()} == {k: (t.shape, t.dtype) for k, t in fp32.items()}


def test_zero_gradients_at_first_move_nothing_and_later_nothing_far(case: Case) -> None:
    rule, values = case.rule(), start(case)
    state = {name: rule.init(name, value) for name, value in values.items()}
    before = {name: value.clone() for name, value in values.items()}
    for step in (1, 2):
        rule.update([Slot(n, v, torch.zeros_like(v), state[n], step, case.lr, 0.0) for n, v in values.items()])
    assert_same_bits(values, before)
    for step in range(3, 20):
        rule.update(list(slots(values, state, step, case.lr)))
    for step in range(20, 60):
        before = {name: value.clone() for name, value in values.items()}
        rule.update([Slot(n, v, torch.zeros_like(v), state[n], step, case.lr, 0.0) for n, v in values.items()])
        for name, value in values.items():
            rms = (value - before[name]).square().mean().sqrt() / case.lr
            assert rms < 2, f"{name} moved by {rms:g} times lr"  # and neither inf nor nan


def test_weight_decay_acts_without_a_gradient(case: Case) -> None:
    rule, values = case.rule(), start(case)
    before = {name: value.clone() for name, value in values.items()}
    grads = {name: torch.zeros_like(value) for name, value in values.items()}
    rule.update([Slot(n, v, grads[n], rule.init(n, v), 1, 0.01, 0.5) for n, v in values.items()])
    for name, value in values.items():
        torch.testing.assert_close(value, before[name] * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)


def test_a_parameter_without_a_gradient_waits(case: Case) -> None:
    """It goes on as if the steps that it missed had not been."""
    rule, values = case.rule(), start(case)
    state = {name: rule.init(name, value) for name, value in values.items()}
    whole, whole_state = run(case, range(1, 5), start(case))
    assert_same_bits(run(case, range(1, 5), values, state)[0], whole)
    missing = values.pop("wide")
    run(case, range(5, 9), values, state)
    values["wide"] = missing
    for step in range(5, 9):
        rule.update([slot for slot in slots(values, state, step, case.lr) if slot.name == "wide"])
    assert_same_bits(values, run(case, range(5, 9), whole, whole_state)[0])


def test_the_order_of_parameters_changes_nothing(case: Case) -> None:
    there, _ = run(case, range(1, 6), start(case))
    back, _ = run(case, range(1, 6), dict(reversed(start(case).items())))
    assert_same_bits(there, back)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rule().by_rows])
def test_rows_apart_are_the_whole_where_a_rule_says_so(name: str) -> None:
    """To the bit, as long as a piece is a multiple of 16 numbers: torch's fused AdamW does the last few of a tensor on
    the CPU in another order."""
    case = CASES[name]
    rule, apart = case.rule(), start(case)
    whole, whole_state = run(case, range(1, 9), start(case))
    state = {name: rule.init(name, value) for name, value in apart.items()}
    for step in range(1, 9):
        for slot in slots(apart, state, step, case.lr):
            rule.update(list(in_rows(slot)))
    assert_same_bits(apart, whole)
    for parameter, tensors in whole_state.items():
        assert_same_bits(state[parameter], tensors)


def in_rows(slot: Slot) -> Iterator[Slot]:
    if slot.value.ndim == 0:
        yield slot
        return
    rows = 64 if slot.value.ndim == 1 else 3
    for first in range(0, len(slot.value), rows):
        part = slice(first, first + rows)
        state = {key: tensor[part] for key, tensor in slot.state.items()}
        yield replace(slot, value=slot.value[part], grad=slot.grad[part], state=state)


def test_no_rule_reads_a_number_back_from_the_device(case: Case) -> None:
    values = start(case)
    _, state = run(case, (1,), values)
    rule, at_step = case.rule(), list(slots(values, state, 2, case.lr))
    with _NoReading():
        rule.update(at_step)


class _NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        return func(*args, **(kwargs or {}))


# Against torch's optimizers


def torch_adamw(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False)


def torch_adafactor(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-15, 1e-3))


def torch_muon(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=1e-3, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", torch_adamw),
        ("adamw_offload", torch_adamw),
        ("adafactor", torch_adafactor),
        ("muon", torch_muon),
    ],
)
def test_torchs_optimizer_makes_the_same_steps(name: str, theirs: Callable[[Groups], torch.optim.Optimizer]) -> None:
    case, steps = CASES[name], range(1, 51)
    ours, _ = run(case, steps, start(case))
    # torch's Muon takes no stacks: for it experts are parameters of their own.
    apart = {key: list(v) if name == "muon" and v.ndim == 3 else [v] for key, v in start(case).items()}
    parameters = {key: [torch.nn.Parameter(part) for part in parts] for key, parts in apart.items()}
    everything = [part for parts in parameters.values() for part in parts]
    optimizer = theirs(
        [
            {"params": [part for part in everything if part.ndim > 1], "weight_decay": DECAY},
            {"params": [part for part in everything if part.ndim < 2], "weight_decay": 0.0},
        ]
    )
    for step in steps:
        for key, parts in parameters.items():
            grad = gradient(key, ours[key], step)
            for part, its_grad in zip(parts, grad if len(parts) > 1 else [grad], strict=True):
                part.grad = its_grad
        optimizer.step()
    for key, parts in parameters.items():
        whole = torch.stack(list(parts)) if len(parts) > 1 else parts[0]
        torch.testing.assert_close(ours[key], whole.detach(), rtol=1e-6, atol=1e-6)


# AdamW in 8 bits


@pytest.mark.parametrize(
    ("code", "smallest", "signs"), [(Code.signed(), 1.1e-5, (-1, 1)), (Code.positive(), 1e-10, (1,))], ids=["m", "v"]
)
def test_a_coded_number_is_within_five_percent_down_to_the_smallest_share(
    code: Code, smallest: float, signs: tuple[int, ...]
) -> None:
    generator = seeded("code")
    numbers = 10 ** (torch.rand(8, 600, generator=generator) * 12 - 11)
    numbers *= torch.tensor(signs)[torch.randint(len(signs), numbers.shape, generator=generator)]
    numbers[3] = 0
    numbers[4, 300] = 1e20  # an outlier
    blocks = [numbers[:, :256], numbers[:, 256:512], numbers[:, 512:]]
    greatest = torch.cat([block.abs().amax(1, keepdim=True).expand_as(block) for block in blocks], 1)

    codes, scales = torch.empty(8, 600, dtype=torch.uint8), torch.empty(8, 3)
    code.encode(numbers.clone(), codes, scales)
    found = code.decode(codes, scales)
    within = numbers.abs() >= smallest * greatest
    torch.testing.assert_close(found[within], numbers[within], rtol=0.05, atol=0)
    assert (found[~within].abs() <= 1.05 * smallest * greatest[~within]).all()
    assert (found[3] == 0).all()
    assert (code.decode(codes[3:4], torch.ones(1, 3)).abs() <= 1e-10).all(), "zeros have the code of zero"
    assert within[4, :256].any(), "an outlier costs only the numbers of its own block"
    assert not within[4, 256:512][numbers[4, 256:512] != 1e20].any()


def in_8_bits(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Each step's update, in learning rates."""
    rule, updates = AdamW8bit(AdamW8bitSpec()), []
    value = torch.zeros(16, 256)
    state = rule.init("w", value)
    for step, grad in enumerate(gradients, 1):
        before = value.clone()
        rule.update([Slot("w", value, grad.clone(), state, step, 1.0, 0.0)])
        updates.append(before - value)
    return updates


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6, 1e-9])
def test_a_second_moment_too_small_for_its_block_does_not_blow_up_the_update(size: float) -> None:
    """A code with a zero makes the second step 4000 learning rates long."""
    grad = torch.full((16, 256), size)
    grad[:, 0] = 1.0
    assert max(update.abs().max() for update in in_8_bits([grad, *[torch.zeros_like(grad)] * 20])) < 1.01


def test_a_weight_without_gradients_comes_to_rest_beside_one_that_has_them() -> None:
    """The smallest share of a first moment must round down to zero, else this drifts by a learning rate a step."""
    busy, whole = torch.zeros(16, 256), torch.ones(16, 256)
    busy[:, 0] = 1.0
    updates = in_8_bits([whole] * 20 + [busy] * 600)
    assert updates[19][:, 1:].min() > 0.9
    assert updates[-1][:, 0].min() > 0.9
    assert updates[-1][:, 1:].abs().max() == 0


def test_vectors_and_small_matrices_keep_fp32_moments() -> None:
    rule = AdamW8bit(AdamW8bitSpec())
    for shape, dtype in (((8192,), torch.float32), ((63, 65), torch.float32), ((64, 64), torch.uint8)):
        assert rule.init("w", torch.zeros(shape))["exp_avg"].dtype == dtype


@pytest.mark.parametrize("seed", range(2))
def test_a_small_language_model_ends_within_five_thousandths_of_a_nat_of_adamw(seed: int) -> None:
    fp32, coded = (language_model_loss(rule, seed) for rule in (AdamW(AdamWSpec()), AdamW8bit(AdamW8bitSpec())))
    assert fp32 < 2.9, "of 4.16 for guessing: it has learned"
    assert abs(coded - fp32) < 0.005


def language_model_loss(rule: UpdateRule, seed: int) -> float:
    """After 200 steps on a language of 64 words, each drawn by the two before it."""
    words, width, hidden = 64, 64, 128
    generator = seeded("model", seed)
    values = {
        "embed": torch.randn(words, width, generator=generator) / 2,
        "up": torch.randn(hidden, 3 * width, generator=generator) / (3 * width) ** 0.5,
        "head": torch.randn(words, hidden, generator=generator) / hidden**0.5,
    }
    last, before_last = (torch.randn(words, words, generator=seeded("language", i)) * (2 - i) for i in range(2))

    def sentences(count: int, *key: object) -> Tensor:
        draw = seeded(*key)
        found = list(torch.randint(words, (2, count), generator=draw))
        for _ in range(2):
            chances = (last[found[-1]] + before_last[found[-2]]).softmax(-1)
            found.append(torch.multinomial(chances, 1, generator=draw).squeeze(1))
        return torch.stack(found, 1)

    def loss(text: Tensor) -> Tensor:
        features = values["embed"][text[:, :3]].flatten(1)
        logits = (features @ values["up"].T).relu() @ values["head"].T
        return torch.nn.functional.cross_entropy(logits, text[:, 3])

    state = {name: rule.init(name, value) for name, value in values.items()}
    for step in range(1, 201):
        for value in values.values():
            value.requires_grad_()
        grads = torch.autograd.grad(loss(sentences(256, seed, step)), list(values.values()))
        for value in values.values():
            value.requires_grad_(False)
        rule.update([Slot(n, v, g, state[n], step, 3e-3, 0.0) for (n, v), g in zip(values.items(), grads, strict=True)])
    return float(loss(sentences(8192, "held out")))


# The others


def test_offload_says_that_it_is_not_engaged_on_a_cpu_and_is_adamw_to_the_bit() -> None:
    assert "host" in why_not(torch.device("cpu"))
    assert_same_bits(
        run(CASES["adamw_offload"], range(1, 9), start(CASES["adamw"]))[0],
        run(CASES["adamw"], range(1, 9), start(CASES["adamw"]))[0],
    )


@pytest.mark.parametrize("share", [1e-3, 1e-6])
def test_adafactors_updates_do_not_depend_on_the_gradients_size(share: float) -> None:
    """With torch's own epsilon small gradients get full-size updates and large ones do not."""
    case = CASES["adafactor"]

    def after(factor: float) -> Tensors:
        rule, values = case.rule(), start(case)
        state = {name: rule.init(name, value) for name, value in values.items()}
        for step in range(1, 12):
            size = factor * (0.1 if step > 6 else 1.0)  # below the second moment's: updates shorter than the limit
            of_step = [replace(slot, grad=slot.grad * size) for slot in slots(values, state, step, case.lr)]
            rule.update(of_step)
        return values

    large, small = after(1.0), after(share)
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-5, atol=1e-6)


def test_muon_makes_all_singular_values_of_an_update_about_one_and_its_size_adamws() -> None:
    rule = Muon(MuonSpec())
    for shape in ((64, 64), (48, 160), (160, 48), (3, 40, 40)):
        value = torch.zeros(shape)
        grad = torch.randn(shape, generator=seeded("muon", shape))
        rule.update([Slot("w", value, grad, rule.init("w", value), 1, 1.0, 0.0)])
        singular = torch.linalg.svdvals(value) / (0.2 * max(shape[-2:]) ** 0.5)
        assert 0.3 < singular.min() < singular.max() < 1.3
        assert 0.6 < singular.mean() < 1.1
        assert 0.1 < value.square().mean().sqrt() < 0.25


def test_muon_of_a_stack_is_muon_of_each_matrix() -> None:
    whole, _ = run(CASES["muon"], range(1, 6), start(CASES["muon"]))
    rule, experts = Muon(MuonSpec()), list(start(CASES["muon"])["experts"])
    states = [rule.init("w", expert) for expert in experts]
    for step in range(1, 6):
        grads = gradient("experts", whole["experts"], step)
        for expert, grad, state in zip(experts, grads, states, strict=True):
            rule.update([Slot("w", expert, grad, state, step, CASES["muon"].lr, DECAY)])
    assert torch.equal(torch.stack(experts), whole["experts"])


def test_muon_refuses_a_vector() -> None:
    with pytest.raises(AssertionError, match="'norm' has the shape"):
        Muon(MuonSpec()).init("norm", torch.zeros(8))
