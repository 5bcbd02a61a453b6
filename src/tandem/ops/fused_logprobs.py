"""Compute logprob and entropy of tokens from hidden states, without a `[tokens, vocab]` tensor in memory.

Shapes: N tokens, H hidden, V vocabulary (rows of the lm-head), C tokens of a chunk, B ids of a block.

The forward pass goes by chunks of tokens, because a row's log-sum-exp needs the whole row: one matrix product, then one
pass over its result. Only the log-sum-exp of each token is kept for the backward pass.

The backward pass recomputes logits by blocks of the vocabulary. Either way one of the two gradients is a sum over
several products. For N = 65,536, H = 2048, V = 152k in bf16:
- by chunks of tokens this is the weight's gradient: 1.24 GB in fp32, read and written for each of the ~80 chunks that
  fit beside it in 1.8 GB: 200 GB, 46 ms at 4.3 TB/s;
- by blocks of the vocabulary it is the hidden states' gradient: 0.54 GB, for each of ~48 blocks: 52 GB, 12 ms, and each
  block of the weight's gradient is complete at once.
Both gradients are summed in fp32 and rounded once. Logits are fp32 as well: a bf16 logit of 20 is off by up to 0.06,
and so would be the token's logprob.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.ops import byte_sizes
from tandem.ops.byte_sizes import WORKSPACE_BYTES
from tandem.ops.softcap import Curve


def score(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    *,
    num_ids: int,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each id, with gradients to hidden states and weight, and the entropy at each position,
    without a gradient."""
    assert hidden_NH.dim() == 2, f"hidden states are [tokens, hidden], not {list(hidden_NH.shape)}"
    assert ids_N.shape == hidden_NH.shape[:1], f"{list(ids_N.shape)} ids for {len(hidden_NH)} hidden states"
    curve = Curve.of(num_ids, scale, softcap, temperature)
    assert hidden_NH.dtype == weight_VH.dtype, f"hidden states are {hidden_NH.dtype}, the weight is {weight_VH.dtype}"
    logprobs_N, entropy_N = _Score.apply(hidden_NH, weight_VH, ids_N, curve, workspace_bytes)
    return logprobs_N, entropy_N


def logits(hidden: Tensor, weight_VH: Tensor) -> Tensor:
    """Return all logits of a few rows, in the precision that `score` uses."""
    return _Logits.apply(hidden.flatten(0, -2), weight_VH).view(*hidden.shape[:-1], len(weight_VH))


def buffer_bytes(num_tokens: int, weight_VH: Tensor) -> tuple[int, int]:
    """Return the temporary memory of the forward and of the backward pass over so many tokens."""
    vocab, width = weight_VH.shape
    itemsize, on_gpu, trained = weight_VH.element_size(), weight_VH.is_cuda, weight_VH.requires_grad
    return byte_sizes.head_bytes(num_tokens, vocab, width, itemsize, on_gpu=on_gpu, trained=trained)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, curve: Curve, workspace_bytes: int
    ) -> tuple[Tensor, Tensor]:
        lse_N, logprobs_N, entropy_N = _forward(hidden_NH, weight_VH, ids_N, curve, workspace_bytes)
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, lse_N)
        ctx.curve, ctx.workspace_bytes = curve, workspace_bytes
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH, ids_N, lse_N = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        hidden_grad_NH, weight_grad_VH = _backward(
            hidden_NH, weight_VH, ids_N, lse_N, grads[0], ctx.curve, ctx.workspace_bytes, wanted
        )
        return hidden_grad_NH, weight_grad_VH, None, None, None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH)
        return _product(hidden_NH, weight_VH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH = ctx.saved_tensors
        grad_NV = grads[0].to(_slope_dtype(hidden_NH))
        hidden = _product(grad_NV, weight_VH).to(hidden_NH.dtype) if ctx.needs_input_grad[0] else None
        weight = _product(grad_NV.t(), hidden_NH).to(weight_VH.dtype) if ctx.needs_input_grad[1] else None
        return hidden, weight


# --- the two passes


def _forward(
    hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, curve: Curve, workspace_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, logprob and entropy of each token."""
    (count, _), vocab = hidden_NH.shape, len(weight_VH)
    dtype = _logits_dtype(hidden_NH)
    lse_N, logprobs_N, entropy_N = (
        torch.empty(count, dtype=_sum_dtype(hidden_NH), device=hidden_NH.device) for _ in range(3)
    )
    chunks, _ = byte_sizes.head_chunks(count, vocab, _numbers(hidden_NH), workspace_bytes)
    buffer = _matrix(chunks[0].stop if chunks else 0, vocab, dtype, hidden_NH)
    look = _kernels().look if _has_kernels(hidden_NH) else _look
    for chunk in chunks:
        raw_CV = _product(hidden_NH[chunk], weight_VH.t(), out=buffer[: chunk.stop - chunk.start])
        look(raw_CV, ids_N[chunk], curve, lse_N[chunk], logprobs_N[chunk], entropy_N[chunk])
    return lse_N, logprobs_N, entropy_N


def _backward(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    curve: Curve,
    workspace_bytes: int,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden states and weight, as far as they are wanted."""
    (count, width), sum_dtype = hidden_NH.shape, _sum_dtype(hidden_NH)
    # Up to the end of a tile, as far as there are rows; rows without an id get a zero gradient.
    multiple = _numbers(hidden_NH).multiple
    reached = min(-(-curve.num_ids // multiple) * multiple, len(weight_VH)) if count else 0
    hidden_grad_NH = torch.zeros((count, width), dtype=sum_dtype, device=hidden_NH.device) if wanted[0] else None
    weight_grad_VH = torch.empty_like(weight_VH) if wanted[1] else None
    if weight_grad_VH is not None:
        weight_grad_VH[reached:] = 0
    dtype, slope_dtype = _logits_dtype(hidden_NH), _slope_dtype(hidden_NH)
    blocks, _ = byte_sizes.head_blocks(count, reached, width, _numbers(hidden_NH), wanted, workspace_bytes)
    longest = blocks[0].stop if blocks else 0
    buffer = _matrix(count, longest, dtype, hidden_NH)
    slopes = buffer if slope_dtype == dtype else _matrix(count, longest, slope_dtype, hidden_NH)
    slope = _kernels().slope if _has_kernels(hidden_NH) else _slope
    for block in blocks:
        weight_BH, size = weight_VH[block], block.stop - block.start
        raw_NB = _product(hidden_NH, weight_BH.t(), out=buffer[:, :size])
        slope_NB = slope(raw_NB, block.start, ids_N, lse_N, grad_N, curve, slopes[:, :size])
        if hidden_grad_NH is not None:
            _add_product(hidden_grad_NH, slope_NB, weight_BH)
        if weight_grad_VH is not None:
            weight_grad_VH[block] = _product(slope_NB.t(), hidden_NH)
    return None if hidden_grad_NH is None else hidden_grad_NH.to(hidden_NH.dtype), weight_grad_VH


# --- the reference in plain torch; ops/fused_logprobs_triton.py has both functions for a GPU


def _look(raw_CV: Tensor, ids_C: Tensor, curve: Curve, lse_C: Tensor, logprobs_C: Tensor, entropy_C: Tensor) -> None:
    """Fill the last three arguments; may overwrite the logits."""
    logits_CV = raw_CV[:, : curve.num_ids].mul_(curve.inner)
    if curve.outer:
        logits_CV.tanh_().mul_(curve.outer)
    lse_C.copy_(logits_CV.logsumexp(-1))
    logprobs_C.copy_(logits_CV.gather(-1, ids_C[:, None]).squeeze(-1) - lse_C)
    probs_CV = (logits_CV - lse_C[:, None]).exp_()
    entropy_C.copy_(lse_C - probs_CV.mul_(logits_CV).sum(-1))


def _slope(
    raw_NB: Tensor, first_id: int, ids_N: Tensor, lse_N: Tensor, grad_N: Tensor, curve: Curve, slope_NB: Tensor
) -> Tensor:
    """Write the gradient of the matrix product's result into `slope_NB`, which may be `raw_NB` itself."""
    logits_NB = raw_NB.mul_(curve.inner)
    bend_NB: Tensor | float = curve.inner
    if curve.outer:
        tanh_NB = logits_NB.tanh_()
        bend_NB = (1 - tanh_NB.square()).mul_(curve.inner * curve.outer)
        logits_NB = tanh_NB.mul_(curve.outer)
    minus_probs_NB = logits_NB.sub_(lse_N[:, None]).exp_().neg_()
    here_N = ((ids_N >= first_id) & (ids_N < first_id + raw_NB.shape[1])).nonzero().squeeze(-1)
    minus_probs_NB[here_N, ids_N[here_N] - first_id] += 1
    return slope_NB.copy_(minus_probs_NB.mul_(grad_N[:, None]).mul_(bend_NB))


# --- choices by device and type


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64


def _kernels() -> Any:
    from tandem.ops import fused_logprobs_triton  # triton exists where a GPU is

    return fused_logprobs_triton


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits_dtype(tensor: Tensor) -> torch.dtype:
    return _sum_dtype(tensor)


def _slope_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type of the operands of the last two products: tensor cores need the weight's type."""
    return tensor.dtype if tensor.is_cuda else _sum_dtype(tensor)


def _numbers(tensor: Tensor) -> byte_sizes.HeadNumbers:
    return byte_sizes.head_numbers(tensor.element_size(), on_gpu=tensor.is_cuda)


def _matrix(rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Allocate a matrix whose rows start at multiples of 256 bytes: otherwise the product uses a much slower kernel."""
    step = 256 // dtype.itemsize if like.is_cuda else 1
    return torch.empty((rows, -(-columns // step) * step), dtype=dtype, device=like.device)[:, :columns]


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `left @ right`, summed and returned in fp32 (or fp64)."""
    dtype = _sum_dtype(left) if out is None else out.dtype
    if not left.is_cuda or left.dtype == dtype:
        return torch.mm(left.to(dtype), right.to(dtype), out=out)
    if out is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right, out_dtype=dtype, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if not left.is_cuda or left.dtype == total.dtype:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
