"""APOLLO against AdamW, which it imitates, and against itself: resumed, idle, hit by a NaN."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem.optim.adamw import AdamW
from tandem.optim.apollo import Apollo
from tandem.optim.update_rule import Slot, UpdateRule
from tandem.spec.optim import AdamWSpec, ApolloMiniSpec, ApolloSpec

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
NO_LIMIT = 1e30
BOTH = pytest.mark.parametrize("spec", [ApolloSpec(rank=4), ApolloMiniSpec()], ids=["apollo", "mini"])
SHAPES = pytest.mark.parametrize("shape", [(12, 20), (20, 12), (3, 12, 20)], ids=["wide", "tall", "stack"])


pytestmark = pytest.mark.usefixtures("one_thread")


class Unprojected(Apollo):
    """With P = I."""

    def projection(self, name: str, refresh: int, rank: int, m: int, device: torch.device) -> Tensor:
        return torch.eye(m, device=device)


class Weights:
    """Parameters, their states, and a rule that moves them."""

    def __init__(self, rule: UpdateRule, *, decay: float = 0.0, **values: Any) -> None:
        self.rule, self.decay = rule, decay
        self.values = {name: value.clone() for name, value in values.items()}
        self.states = {name: rule.init(name, value) for name, value in self.values.items()}
        self.updates = 0

    def update(self, lr: float = 1.0, **grads: Any) -> None:
        self.updates += 1
        slots = [
            Slot(name, self.values[name], grad.clone(), self.states[name], self.updates, lr, self.decay)
            for name, grad in grads.items()
        ]
        self.rule.update(slots)

    def moved(self, grad: Tensor) -> Tensor:
        """By how much an update moves `w`: lr * D."""
        before = self.values["w"].clone()
        self.update(w=grad)
        return before - self.values["w"]


def draws(seed: int, *shape: int, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def gradients(seed: int, *shape: int, count: int) -> list[Tensor]:
    """A direction that stays, noise, and channels and rows of very different sizes."""
    direction, rows, columns, *noise = draws(seed, *shape, count=count + 3)
    size = rows[..., :1].exp() * columns[..., :1, :].exp() * 1e-3
    return [size * (direction + each) for each in noise]


def channels(matrix: Tensor) -> Tensor:
    """[m, n] with m <= n: one column a channel."""
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def lengths(matrix: Tensor) -> Tensor:
    return channels(matrix).norm(dim=-2)


def cosines(x: Tensor, y: Tensor) -> Tensor:
    return torch.cosine_similarity(channels(x), channels(y), dim=-2)


# 1
@SHAPES
def test_without_projection_each_channel_is_as_long_as_adamws_and_points_along_the_gradient(shape: tuple[int, ...]):
    rank = min(shape[-2:])
    spec = ApolloSpec(rank=rank, growth_limit=NO_LIMIT)
    apollo = Weights(Unprojected(spec, seed=0), w=torch.zeros(shape))
    adamw = Weights(AdamW(AdamWSpec()), w=torch.zeros(shape))
    for grad in gradients(1, *shape, count=8):
        moved, adamws = apollo.moved(grad), adamw.moved(grad)
        torch.testing.assert_close(lengths(moved), lengths(adamws), rtol=1e-4, atol=0)
        torch.testing.assert_close(cosines(moved, grad), torch.ones_like(lengths(grad)), rtol=1e-5, atol=0)


# 2
@pytest.mark.parametrize("shape", [(1, 40), (40, 1)])
def test_a_matrix_of_one_row_without_projection_and_momentum_is_adamw(shape: tuple[int, int]):
    spec = ApolloSpec(rank=1, betas=(0.0, 0.999), growth_limit=NO_LIMIT)
    start = draws(0, *shape)[0]
    apollo = Weights(Unprojected(spec, seed=0), w=start, decay=0.1)
    adamw = Weights(AdamW(AdamWSpec(betas=(0.0, 0.999))), w=start, decay=0.1)
    for grad in gradients(1, *shape, count=8):
        grad[..., -1] = 0  # 0 / 0 in one channel
        apollo.update(0.5, w=grad)
        adamw.update(0.5, w=grad)
        torch.testing.assert_close(apollo.values, adamw.values, rtol=1e-6, atol=1e-6)


# 3
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("shape", [(128, 384), (384, 128)])
def test_the_median_scale_is_the_full_rank_one_times_the_root_of_rank_over_m(rank: int, shape: tuple[int, int]):
    grads = draws(1, *shape, count=6)
    full = Weights(Unprojected(ApolloSpec(rank=128, growth_limit=NO_LIMIT), seed=0), w=torch.zeros(shape))
    aims = [lengths(full.moved(grad)) for grad in grads]
    ratios = []
    for seed in range(8):  # channels share P, whose own length is a draw
        projected = Weights(Apollo(ApolloSpec(rank=rank, growth_limit=NO_LIMIT), seed), w=torch.zeros(shape))
        ratios += [lengths(projected.moved(grad)) / aim for grad, aim in zip(grads, aims, strict=True)]
    # A draw's length has sqrt(m / rank) in it already.
    assert 0.95 <= torch.cat(ratios).median().item() <= 1.05


# 4
@SHAPES
@BOTH
def test_an_update_has_full_rank_and_no_channel_turns(spec: ApolloMiniSpec, shape: tuple[int, ...]):
    weights = Weights(Apollo(spec, seed=0), w=torch.zeros(shape))
    for grad in gradients(1, *shape, count=5):
        moved = weights.moved(grad)
        assert (torch.linalg.matrix_rank(moved.double()) == 12).all()
        torch.testing.assert_close(cosines(moved, grad), torch.ones_like(lengths(grad)), rtol=1e-5, atol=0)


def test_mini_keeps_the_gradients_direction():
    weights = Weights(Apollo(ApolloMiniSpec(), seed=0), w=torch.zeros(12, 20))
    for grad in gradients(1, 12, 20, count=5):
        assert torch.cosine_similarity(weights.moved(grad).flatten(), grad.flatten(), dim=0) == pytest.approx(1)


# 5
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (2, 1024, 4096)])
@pytest.mark.parametrize(("spec", "most"), [(ApolloSpec(), 1 / 8), (ApolloMiniSpec(), 1 / 100)], ids=["apollo", "mini"])
def test_the_state_is_two_rows_a_rank_and_two_numbers(shape: tuple[int, ...], spec: ApolloMiniSpec, most: float):
    state = Apollo(spec, seed=0).init("w", torch.empty(shape))
    rank = spec.rank if isinstance(spec, ApolloSpec) else 1
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    experts = shape[0] if len(shape) == 3 else 1
    kept = sum(tensor.nbytes for tensor in state.values())
    assert kept == 4 * (2 * 4096 * rank + 2) * experts
    assert kept <= most * 2 * 4 * math.prod(shape)


def test_the_rank_is_no_more_than_the_smaller_side():
    weights = Weights(Apollo(ApolloSpec(rank=64), seed=0), w=torch.zeros(5, 9))
    assert weights.states["w"]["momentum"].shape == (5, 9)
    assert weights.moved(torch.ones(5, 9)).norm() > 0


# 6
@BOTH
def test_resumed_at_any_step_it_goes_on_bit_by_bit(spec: ApolloMiniSpec, tmp_path: Path):
    spec = spec.model_copy(update={"refresh_every": 3})
    shapes = {"wide": (6, 10), "tall": (10, 6), "stack": (2, 6, 10)}
    start = {name: draws(0, *shape)[0] for name, shape in shapes.items()}
    steps = [{name: draws(10 + step, *shape)[0] for name, shape in shapes.items()} for step in range(8)]

    def run(stop: int | None) -> dict[str, Tensor]:
        weights = Weights(Apollo(spec, seed=7), decay=0.1, **start)
        for step, grads in enumerate(steps):
            if step == stop:
                save_file(
                    {f"{name}|{key}": x for name, state in weights.states.items() for key, x in state.items()},
                    tmp_path / "state.safetensors",
                )
                resumed = Weights(Apollo(spec, seed=7), decay=0.1, **weights.values)
                for place, tensor in load_file(tmp_path / "state.safetensors").items():
                    name, key = place.split("|")
                    resumed.states[name][key].copy_(tensor)
                resumed.updates = step
                weights = resumed
            weights.update(1e-2, **grads)
        return weights.values

    whole = run(None)
    for stop in range(8):
        assert all(torch.equal(run(stop)[name], value) for name, value in whole.items()), f"stopped after {stop}"


def test_the_projection_is_its_parameters_own_and_follows_from_seed_and_step():
    seen: dict[tuple[int, str, int], Tensor] = {}
    refreshes: list[int] = []

    class Watched(Apollo):
        def projection(self, name: str, refresh: int, rank: int, m: int, device: torch.device) -> Tensor:
            drawn = super().projection(name, refresh, rank, m, device)
            refreshes.append(refresh)
            seen.setdefault((self._seed, name, refresh), drawn)
            assert torch.equal(seen[self._seed, name, refresh], drawn)
            return drawn

    def run(seed: int, *names: str) -> Weights:
        start = cast(dict[str, Any], dict.fromkeys(names, torch.zeros(6, 10)))
        weights = Weights(Watched(ApolloSpec(rank=4, refresh_every=2), seed), **start)
        for grad in draws(1, 6, 10, count=5):
            grads = cast(dict[str, Any], dict.fromkeys(names, grad))
            weights.update(**grads)
        return weights

    forth, back = run(0, "a", "b"), run(0, "b", "a")
    assert all(torch.equal(forth.values[name], back.values[name]) for name in "ab")
    run(1, "a")
    assert refreshes[-5:] == [0, 0, 1, 1, 2]
    assert set(seen) == {(0, name, index) for name in "ab" for index in range(3)} | {(1, "a", i) for i in range(3)}
    drawn = list(seen.values())
    assert not any(torch.equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])


def test_the_projection_keeps_lengths_in_the_mean():
    drawn = Apollo(ApolloSpec(), seed=0).projection("w", 0, 64, 512, torch.device("cpu"))
    assert drawn.square().sum(0).mean().item() == pytest.approx(1, abs=0.02)


# 7, and the limiter
@SHAPES
@BOTH
def test_an_update_grows_by_no_more_than_the_limit(spec: ApolloMiniSpec, shape: tuple[int, ...]):
    grads = [grad * 100 ** (step % 5 == 4) for step, grad in enumerate(draws(1, *shape, count=20))]
    free = Weights(Apollo(spec.model_copy(update={"growth_limit": NO_LIMIT}), seed=0), w=torch.zeros(shape))
    limited = Weights(Apollo(spec, seed=0), w=torch.zeros(shape))
    aims = [free.moved(grad).norm(dim=(-2, -1)) for grad in grads]
    expected = aims[0]
    cut = 0
    for grad, aim in zip(grads, aims, strict=True):
        cut += int((aim > 1.01 * expected).any())
        expected = aim if grad is grads[0] else torch.minimum(aim, 1.01 * expected)
        torch.testing.assert_close(limited.moved(grad).norm(dim=(-2, -1)), expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(limited.states["w"]["norm"], expected, rtol=1e-4, atol=0)
    assert cut >= 4


@SHAPES
@BOTH
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
def test_a_gradient_of_zeros_or_nan_is_as_if_it_had_not_been(
    spec: ApolloMiniSpec, shape: tuple[int, ...], bad: float, first: bool
):
    start = draws(0, *shape)[0]
    hit, spared = (Weights(Apollo(spec, seed=0), w=start) for _ in range(2))
    grads = draws(1, *shape, count=8)
    poisoned = torch.zeros(shape) if bad == 0 else grads[0].clone()
    poisoned[..., 3, 4] = bad
    for step, grad in enumerate(grads):
        if step == (0 if first else 4):
            before = hit.values["w"].clone()
            hit.update(w=poisoned)
            assert torch.equal(hit.values["w"], before)
            assert all(tensor.isfinite().all() for tensor in hit.states["w"].values())
        moved, normal = hit.moved(grad), spared.moved(grad)
        assert moved.norm() >= 0.9 * normal.norm()
        assert torch.equal(moved, normal)


@BOTH
def test_zeros_decay_the_weights_and_nan_does_not(spec: ApolloMiniSpec):
    weights = Weights(Apollo(spec, seed=0), decay=0.1, w=torch.ones(6, 10))
    weights.update(0.5, w=torch.zeros(6, 10))
    torch.testing.assert_close(weights.values["w"], torch.full((6, 10), 0.95))
    weights.update(0.5, w=torch.full((6, 10), math.nan))
    torch.testing.assert_close(weights.values["w"], torch.full((6, 10), 0.95))


@BOTH
@pytest.mark.parametrize("shape", [(2, 12, 20), (2, 20, 12)])
@pytest.mark.parametrize("idle", [0.0, math.nan])
def test_an_expert_that_was_idle_comes_back_at_full_length(spec: ApolloMiniSpec, shape: tuple[int, ...], idle: float):
    def run(idles: range) -> tuple[Weights, Tensor]:
        weights, moved = Weights(Apollo(spec, seed=0), w=torch.zeros(shape)), torch.zeros(shape)
        for step, grad in enumerate(draws(1, *shape, count=60)):
            if step in idles:
                grad[1] = idle
            moved = weights.moved(grad)
            assert (moved[1].norm() == 0) == (step in idles)
        return weights, moved.norm(dim=(-2, -1))

    (busy, normal), (_, after_idling), (_, never_used) = run(range(0)), run(range(9, 59)), run(range(59))
    assert after_idling[0] == never_used[0] == normal[0], "the other expert has nothing to do with it"
    assert after_idling[1] >= 0.9 * normal[1]
    assert never_used[1] >= 0.9 * normal[1]
    assert busy.states["w"]["count"].tolist() == [60, 60]


@BOTH
@SHAPES
def test_nothing_waits_for_the_device(spec: ApolloMiniSpec, shape: tuple[int, ...]):
    """Tensors without data: whatever asks for a value of one raises."""
    with FakeTensorMode():
        weights = Weights(Apollo(spec, seed=0), decay=0.1, w=torch.zeros(shape))
        weights.update(w=torch.ones(shape))


def test_vectors_are_refused():
    with pytest.raises(AssertionError, match="matrices"):
        Apollo(ApolloSpec(), seed=0).init("w", torch.zeros(4))


# 9: benchmarks/apollo.py at full length, with every optimizer at its own learning rate
def test_a_small_language_model_learns_as_well_as_with_adamw(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    apollo = importlib.import_module("apollo")
    runs = {kind: apollo.train(kind, peak=4e-3, seed=0, steps=120, words=16) for kind in apollo.ALLOWED}
    assert runs["adamw"].loss < 0.32, "there is something to learn, and AdamW learns it"
    for kind, (nats, state) in apollo.ALLOWED.items():
        assert runs[kind].loss <= runs["adamw"].loss + nats, kind
        assert runs[kind].state_share <= state, kind
