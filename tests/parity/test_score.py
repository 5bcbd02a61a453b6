"""The fused lm-head against the naive way in float64, which holds everything at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tandem.ops import byte_sizes
from tandem.ops import fused_logprobs as ops
from tandem.ops.fused_logprobs import score

HIDDEN, VOCAB = 24, 131
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"num_ids": 100},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "scaled": {"scale": 0.25, "temperature": 0.8},
    "capped": {"softcap": 2.0},
    "all": {"num_ids": 90, "temperature": 0.7, "scale": 1.5, "softcap": 3.0},
}
SMALL = 20_000
"""Bytes: a chunk of 6 tokens in forward, a few blocks of ids in backward."""


def inputs(
    count: int, num_ids: int = VOCAB, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, ids, and the gradient of each logprob."""
    generator = torch.Generator().manual_seed(5)
    hidden_NH = torch.randn(count, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VH = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5).to(dtype).requires_grad_()
    ids_N = torch.randint(0, num_ids, (count,), generator=generator)
    return hidden_NH, weight_VH, ids_N, torch.randn(count, generator=generator)


def naive(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    *,
    num_ids: int = VOCAB,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits_NV = (hidden_NH.double() @ weight_VH.double().t())[:, :num_ids] * scale
    if softcap:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    return logprobs_NV[torch.arange(len(ids_N)), ids_N], -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 77])
@pytest.mark.parametrize("workspace_bytes", [1, SMALL, ops.WORKSPACE_BYTES])
def test_values_and_gradients_are_those_of_the_naive_way(case: str, count: int, workspace_bytes: int) -> None:
    options = {"num_ids": VOCAB, **CASES[case]}
    hidden_NH, weight_VH, ids_N, grad_N = inputs(count, options["num_ids"])
    logprobs_N, entropy_N = score(hidden_NH, weight_VH, ids_N, **options, workspace_bytes=workspace_bytes)
    grads = torch.autograd.grad(logprobs_N, [hidden_NH, weight_VH], grad_N)
    their_logprobs_N, their_entropy_N = naive(hidden_NH, weight_VH, ids_N, **options)
    their_grads = torch.autograd.grad(their_logprobs_N, [hidden_NH, weight_VH], grad_N.double())
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    assert relative(logprobs_N, their_logprobs_N) < 1e-6
    assert relative(entropy_N, their_entropy_N) < 1e-5  # a small difference of large logits
    torch.testing.assert_close(logprobs_N.double(), their_logprobs_N, atol=3e-6, rtol=1e-6)
    for grad, their_grad in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(grad, their_grad.float(), atol=1e-5, rtol=1e-5)
        assert relative(grad, their_grad) < 1e-6
    assert not grads[1][options["num_ids"] :].any()
    assert not entropy_N.requires_grad


@pytest.mark.parametrize("case", CASES)
def test_in_float64_the_gradient_is_that_of_finite_differences(case: str) -> None:
    options = {"num_ids": VOCAB, **CASES[case]}
    hidden_NH, weight_VH, ids_N, _ = inputs(5, options["num_ids"], torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden_NH, weight_VH: score(hidden_NH, weight_VH, ids_N, **options, workspace_bytes=SMALL)[0],
        (hidden_NH, weight_VH),
        fast_mode=True,
    )


def test_with_bf16_the_only_error_is_that_of_gradients_rounded_once() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(300, dtype=torch.bfloat16)
    logprobs_N, entropy_N = score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB, workspace_bytes=SMALL)
    grads = torch.autograd.grad(logprobs_N, [hidden_NH, weight_VH], grad_N)
    exact_NH, exact_VH = (tensor.detach().double().requires_grad_() for tensor in (hidden_NH, weight_VH))
    their_logprobs_N, their_entropy_N = naive(exact_NH, exact_VH, ids_N)
    their_grads = torch.autograd.grad(their_logprobs_N, [exact_NH, exact_VH], grad_N.double())
    assert relative(logprobs_N, their_logprobs_N) < 1e-6, "logits are not rounded to bf16"
    assert relative(entropy_N, their_entropy_N) < 1e-5
    for grad, their_grad in zip(grads, their_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        assert relative(grad, their_grad) <= 1.01 * relative(their_grad.bfloat16(), their_grad)


class Watch(TorchDispatchMode):
    """Elements of the largest tensor, and the shapes of the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, list[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        if "mm" in func.__name__:
            self.products.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("workspace_bytes", [200_000, 300_000, 600_000])
def test_no_more_than_the_workspace_is_held(workspace_bytes: int) -> None:
    count = 1000
    hidden_NH, weight_VH, ids_N, grad_N = inputs(count)
    with Watch() as watch:
        score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB, workspace_bytes=workspace_bytes)[0].backward(grad_N)
    assert watch.elements < count * VOCAB
    logits = [rows * columns for rows, columns in watch.products if HIDDEN not in (rows, columns)]
    assert max(logits) * 4 * byte_sizes.EAGER_COPIES <= workspace_bytes
    assert max(logits) * 4 * byte_sizes.EAGER_COPIES > workspace_bytes / 3, "and it is used"
    assert len(logits) > 4


def test_the_reference_holds_as_many_copies_of_the_logits_as_it_is_said_to() -> None:
    """Counted by storages alive, without the gradients and their sums."""
    count, alive, most = 400, dict[int, int](), 0

    class Alive(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            import weakref

            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor) and tensor.numel() >= count * 30:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in alive:
                        alive[storage.data_ptr()] = storage.nbytes()
                        weakref.finalize(storage, alive.pop, storage.data_ptr(), None)
            most = max(most, sum(alive.values()))
            return out

    hidden_NH, weight_VH, ids_N, grad_N = inputs(count)
    with Alive():
        score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB, softcap=2.0)[0].backward(grad_N)
    assert 2 * count * VOCAB * 4 <= most <= byte_sizes.EAGER_COPIES * count * VOCAB * 4


def test_what_needs_no_gradient_costs_no_product() -> None:
    for frozen, products in ((None, 4), ("weight", 3), ("hidden", 3)):
        hidden_NH, weight_VH, ids_N, grad_N = inputs(30)
        hidden_NH.requires_grad_(frozen != "hidden")
        weight_VH.requires_grad_(frozen != "weight")
        with Watch() as watch:
            score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)[0].backward(grad_N)
        assert len(watch.products) == products
        assert (hidden_NH.grad is None) == (frozen == "hidden")
        assert (weight_VH.grad is None) == (frozen == "weight")


def test_without_a_gradient_nothing_is_kept() -> None:
    hidden_NH, weight_VH, ids_N, _ = inputs(30)
    with torch.no_grad():
        quiet_N, _ = score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)
    assert quiet_N.grad_fn is None
    assert torch.equal(quiet_N, score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)[0])


def test_no_tokens_have_no_logprobs_and_gradients_of_zero() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(0)
    logprobs_N, entropy_N = score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)
    logprobs_N.backward(grad_N)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.shape == (0, HIDDEN)
    assert weight_VH.grad is not None
    assert not weight_VH.grad.any()


def test_inputs_and_gradients_need_not_be_contiguous() -> None:
    hidden_NH, weight_VH, ids_N, _ = inputs(40)
    expected_N, _ = score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)
    expected = torch.autograd.grad(expected_N.sum(), [hidden_NH, weight_VH])
    strided_NH = hidden_NH.detach().t().contiguous().t().requires_grad_()
    strided_VH = torch.stack([weight_VH.detach()] * 2, 1)[:, 0].requires_grad_()
    ours_N, _ = score(strided_NH, strided_VH, torch.stack([ids_N, ids_N], 1)[:, 1], num_ids=VOCAB)
    ours = torch.autograd.grad(ours_N, [strided_NH, strided_VH], torch.ones(1).expand(40))
    torch.testing.assert_close(ours_N, expected_N, atol=1e-6, rtol=1e-6)
    for grad, their_grad in zip(ours, expected, strict=True):
        torch.testing.assert_close(grad, their_grad, atol=1e-6, rtol=1e-6)


def test_inside_a_checkpoint_and_with_determinism_asked_for_the_gradient_is_the_same_and_comes_once() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(50)
    score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB, workspace_bytes=SMALL)[0].backward(grad_N)
    expected, weight_VH.grad = weight_VH.grad, None
    arrived: list[Tensor] = []

    def release(parameter: Tensor) -> None:
        assert parameter.grad is not None
        arrived.append(parameter.grad)
        parameter.grad = None

    weight_VH.register_post_accumulate_grad_hook(release)

    def half(hidden_CH: Tensor, ids_C: Tensor) -> Tensor:
        return score(hidden_CH, weight_VH, ids_C, num_ids=VOCAB, workspace_bytes=SMALL)[0]

    torch.use_deterministic_algorithms(True)
    try:
        halves = [
            checkpoint(half, hidden_CH, ids_C, use_reentrant=False)
            for hidden_CH, ids_C in zip(hidden_NH.split(25), ids_N.split(25), strict=True)
        ]
        torch.cat([part for part in halves if isinstance(part, Tensor)]).backward(grad_N)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(arrived) == 1
    assert expected is not None
    torch.testing.assert_close(arrived[0], expected, atol=1e-6, rtol=1e-6)


def test_an_id_outside_the_distribution_is_an_error() -> None:
    hidden_NH, weight_VH, ids_N, _ = inputs(10)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        score(hidden_NH, weight_VH, ids_N.fill_(100), num_ids=100)


def test_pieces_cover_everything_once_and_are_about_equal() -> None:
    for total, most, multiple in (
        (0, 5, 1),
        (1, 5, 1),
        (1000, 300, 1),
        (151_936, 3400, 256),
        (65_536, 2961, 256),
        (7, 0, 4),
    ):
        pieces = list(byte_sizes.pieces(total, most, multiple))
        covered = [number for piece in pieces for number in range(piece.start, piece.stop)]
        assert covered == list(range(total))
        assert all(piece.stop - piece.start <= max(most, multiple) for piece in pieces)
        assert all(piece.start % multiple == 0 for piece in pieces)
        assert len(pieces) == -(-total // (max(most // multiple, 1) * multiple))


def test_a_whole_row_of_logits_is_the_one_that_is_scored() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(30, dtype=torch.bfloat16)
    logprobs_N = ops.logits(hidden_NH.view(5, 6, HIDDEN), weight_VH).view(30, VOCAB).log_softmax(-1)
    logprobs_N = logprobs_N.gather(1, ids_N[:, None]).squeeze(1)
    theirs_N, _ = score(hidden_NH, weight_VH, ids_N, num_ids=VOCAB)
    torch.testing.assert_close(logprobs_N, theirs_N, atol=2e-6, rtol=1e-6)
    ours = torch.autograd.grad(logprobs_N, [hidden_NH, weight_VH], grad_N)
    for grad, their_grad in zip(ours, torch.autograd.grad(theirs_N, [hidden_NH, weight_VH], grad_N), strict=True):
        torch.testing.assert_close(grad, their_grad, atol=1e-3, rtol=1e-2)
