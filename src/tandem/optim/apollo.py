"""APOLLO and APOLLO-Mini (arXiv 2412.05270): AdamW's step sizes from a low-rank sketch of the gradient.

AdamW rescales every element of the gradient. One scale a channel (APOLLO) or a matrix (APOLLO-Mini) is nearly as good,
and can be computed from moments of the gradient's random projection to `rank` rows:

    R = P G                                    P ~ N(0, 1/rank), another one every `refresh_every` steps
    M, V = AdamW's moments of R                U = M / (sqrt(V) + eps), bias-corrected
    s_j = |U[:, j]| / |R[:, j]|                Mini: rank 1, s = |U| / |R| for the whole matrix
    D = scale * sqrt(m / rank) * G diag(s)     its norm is at most `growth_limit` times the last D's
    W -= lr * decay * W;  W -= lr * D

G is [m, n] with m <= n, or its transpose: the smaller side is projected, the larger one has the channels. A stack of
matrices [experts, rows, columns] is that many matrices, which share P.

P is drawn again at each step, from seed, parameter name and number of refreshes, so neither resuming nor another order
of parameters changes it. (CPU and CUDA, and perhaps two models of GPU, draw different numbers from one seed. A
run resumed on another device gets other projections, as if P were refreshed early.) A refresh leaves M and V in the
old projection's basis, as in the paper.

State a matrix, all fp32: `momentum` and `variance` [rank, n], `norm` of the last D, `count` of the updates in M and V.
A gradient that is zero, or not finite, changes none of them. Otherwise the moments of an idle expert would decay, and
its limit would need a thousand steps to grow again. With a gradient of zeros the weight still decays; with one that is
not finite nothing happens. Nothing waits for the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from tandem.ops.byte_sizes import state_shapes
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import ApolloMiniSpec, ApolloSpec

# Shapes in names: R rank, M smaller side, N larger side (channels); a stack's experts come before them.


class Apollo(ByParts):
    by_rows = False

    def __init__(self, spec: ApolloSpec | ApolloMiniSpec, seed: int) -> None:
        self._spec = spec
        self._seed = seed
        self._rank = spec.rank if isinstance(spec, ApolloSpec) else 1
        self._one_scale = not isinstance(spec, ApolloSpec)

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        assert like.ndim in (2, 3), f"APOLLO is for matrices and stacks of them, but {name} is {list(like.shape)}"
        shapes = state_shapes("apollo", like.shape, self._rank)
        return {key: torch.zeros(dims, device=like.device) for key, (dims, _) in shapes.items()}

    @torch.no_grad()
    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._update(slot)

    def projection(self, name: str, refresh: int, rank: int, m: int, device: torch.device) -> Tensor:
        """Return P of a parameter after `refresh` refreshes."""
        key = f"{self._seed}|{refresh}|{name}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(rank, m, generator=generator, device=device) / math.sqrt(rank)

    def _update(self, slot: Slot) -> None:
        *_, rows, columns = slot.value.shape
        m = min(rows, columns)
        value_MN, grad_MN = (each.mT if rows > columns else each for each in (slot.value, slot.grad))
        norm, count = (slot.state[key][..., None, None] for key in ("norm", "count"))
        rank = min(self._rank, m)
        refresh = (slot.step - 1) // self._spec.refresh_every
        projection_RM = self.projection(slot.name, refresh, rank, m, grad_MN.device)
        projected_RN, length_1N = projection_RM @ grad_MN, vector_norm(grad_MN, dim=-2, keepdim=True)

        moments = self._moments(projected_RN, slot.state, count)
        scale = self._spec.scale * math.sqrt(m / rank) * self._scale(projected_RN, *moments, count + 1)
        size = vector_norm(scale * length_1N, dim=-1, keepdim=True)
        finite = torch.isfinite(size)
        counts = finite & (size > 0)
        limited = torch.where(norm > 0, torch.minimum(size, self._spec.growth_limit * norm), size)

        if slot.decay:
            value_MN.mul_(torch.where(finite, 1 - slot.lr * slot.decay, 1.0))
        grad_MN.masked_fill_(~finite, 0)  # 0 * nan is nan
        value_MN.addcmul_(grad_MN, torch.where(counts, scale * (limited / size), 0), value=-slot.lr)

        for key, new in zip(("momentum", "variance"), moments, strict=True):
            old = slot.state[key]
            old.copy_(torch.where(counts, new, old))
        norm.copy_(torch.where(counts, limited, norm))
        count.add_(counts)

    def _moments(self, projected_RN: Tensor, state: dict[str, Tensor], count: Tensor) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self._spec.betas
        momentum_RN = state["momentum"].lerp(projected_RN, 1 - beta1)
        variance_RN = state["variance"].lerp(projected_RN.square(), 1 - beta2)
        return momentum_RN, variance_RN

    def _scale(self, projected_RN: Tensor, momentum_RN: Tensor, variance_RN: Tensor, count: Tensor) -> Tensor:
        """Return how much longer AdamW would make the projected gradient: [1, N], or [1, 1] for Mini."""
        beta1, beta2 = self._spec.betas
        root_RN = (variance_RN / _weight(beta2, count)).sqrt_()
        update_RN = momentum_RN / _weight(beta1, count) / (root_RN + self._spec.eps)
        after, before = (vector_norm(each, dim=-2, keepdim=True) for each in (update_RN, projected_RN))
        if self._one_scale:
            after, before = vector_norm(torch.cat([after, before], dim=-2), dim=-1, keepdim=True).split(1, dim=-2)
        return torch.where(before > 0, after / before, 0)


def _weight(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta ** count; computed directly, fp32 would leave four digits for a beta of .999."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
