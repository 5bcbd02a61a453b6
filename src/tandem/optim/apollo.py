"""APOLLO and APOLLO-Mini (arXiv 2412.05270): AdamW's step sizes from a low-rank sketch of the gradient.

AdamW moves a matrix by its gradient with every element rescaled. Nearly as good is one scale a channel (APOLLO) or one
a matrix (APOLLO-Mini), and that many can be had from moments of the gradient's random projection to `rank` rows:

    R = P G                                    P ~ N(0, 1/rank), another one every `refresh_every` steps
    M, V = AdamW's moments of R                U = M / (sqrt(V) + eps), bias-corrected
    s_j = |U[:, j]| / |R[:, j]|                Mini: rank 1, s = |U| / |R| for the whole matrix
    D = scale * sqrt(m / rank) * G diag(s)     no longer than `growth_limit` times the last D
    W -= lr * decay * W;  W -= lr * D

G is seen as [m, n] with m <= n, transposed otherwise: the smaller side is projected, the larger one has the channels.
A stack of matrices [experts, rows, columns] is that many matrices which share P.

P follows from seed, parameter name and number of refreshes, so it is drawn again at each step and never stored, and
neither resuming nor another order of parameters changes it. (CPU and CUDA draw different numbers from one seed, and
so may two models of GPU: a run resumed on another device goes on with other projections, which is a refresh too early
and no more.) A refresh leaves M and V as they are, in the old projection's basis, as in the paper.

State a matrix, all fp32: `momentum` and `variance` [rank, n], `norm` of the last D, `count` of the updates that M and V
have seen. A gradient of zeros or one that is not finite is none of those: M, V and the limiter wait for the next, else
an idle expert would come back with moments that have decayed and a limit that takes a thousand steps to grow. It still
gets its weight decay if it is zeros, and nothing at all if it is not finite. Nothing waits for the device.

DTensors that are sharded along dim 0 of a 1-d mesh (FSDP2) give one process's numbers. What of the state is sharded:

    value                          sharded side     momentum, variance       norm, count   all-reduced
    rows > columns                 channels         Shard(1), by channel     Replicate     norms (scalars)
    rows <= columns                projected side   Replicate                Replicate     R and the channels' norms
    [experts, rows, columns]       experts          Shard(0), by expert      Shard(0)      nothing
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

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
        matrix = _MatrixView(like)
        shapes = state_shapes("apollo", like.shape, self._rank)
        return {key: matrix.zeros(dims[len(matrix.stack) :]) for key, (dims, _) in shapes.items()}

    @torch.no_grad()
    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._update(slot)

    def projection(self, name: str, refresh: int, rank: int, m: int, device: torch.device) -> Tensor:
        """P of a parameter after so many refreshes, the same on every rank."""
        key = f"{self._seed}|{refresh}|{name}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(rank, m, generator=generator, device=device) / math.sqrt(rank)

    def _update(self, slot: Slot) -> None:
        matrix = _MatrixView(slot.value)
        value_MN, grad_MN = matrix.part(slot.value), matrix.part(slot.grad)
        norm, count = (_local(slot.state[key])[..., None, None] for key in ("norm", "count"))
        rank = min(self._rank, matrix.m)
        refresh = (slot.step - 1) // self._spec.refresh_every
        projection_RM = self.projection(slot.name, refresh, rank, matrix.m, grad_MN.device)
        projected_RN, length_1N = matrix.project(projection_RM, grad_MN)

        moments = self._moments(projected_RN, slot.state, count)
        scale = self._spec.scale * math.sqrt(matrix.m / rank) * self._scale(matrix, projected_RN, *moments, count + 1)
        size = matrix.norm(scale * length_1N)
        finite = torch.isfinite(size)
        counts = finite & (size > 0)
        limited = torch.where(norm > 0, torch.minimum(size, self._spec.growth_limit * norm), size)

        if slot.decay:
            value_MN.mul_(torch.where(finite, 1 - slot.lr * slot.decay, 1.0))
        grad_MN.masked_fill_(~finite, 0)  # 0 * nan is nan
        value_MN.addcmul_(grad_MN, torch.where(counts, scale * (limited / size), 0), value=-slot.lr)

        for key, new in zip(("momentum", "variance"), moments, strict=True):
            old = _local(slot.state[key])
            old.copy_(torch.where(counts, new, old))
        norm.copy_(torch.where(counts, limited, norm))
        count.add_(counts)

    def _moments(self, projected_RN: Tensor, state: dict[str, Tensor], count: Tensor) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self._spec.betas
        momentum_RN = _local(state["momentum"]).lerp(projected_RN, 1 - beta1)
        variance_RN = _local(state["variance"]).lerp(projected_RN.square(), 1 - beta2)
        return momentum_RN, variance_RN

    def _scale(
        self, matrix: _MatrixView, projected_RN: Tensor, momentum_RN: Tensor, variance_RN: Tensor, count: Tensor
    ) -> Tensor:
        """How much longer AdamW would make the projected gradient: [1, N], or [1, 1] for Mini."""
        beta1, beta2 = self._spec.betas
        root_RN = (variance_RN / _weight(beta2, count)).sqrt_()
        update_RN = momentum_RN / _weight(beta1, count) / (root_RN + self._spec.eps)
        after, before = (vector_norm(each, dim=-2, keepdim=True) for each in (update_RN, projected_RN))
        if self._one_scale:
            after, before = matrix.norm(torch.cat([after, before], dim=-2)).split(1, dim=-2)
        return torch.where(before > 0, after / before, 0)


class _MatrixView:
    """A parameter as [..., M, N], and what of it this process has."""

    def __init__(self, like: Tensor) -> None:
        *self.stack, rows, columns = like.shape
        self.tall = rows > columns
        self.m, self.n = sorted((rows, columns))
        self.device = like.device
        self.mesh: Any = getattr(like, "device_mesh", None)  # torch.distributed.tensor is slow to import
        if self.mesh is not None:
            placements: Any = getattr(like, "placements")  # noqa: B009
            sharded = self.mesh.ndim == 1 and placements[0].is_shard(0)
            assert sharded, f"APOLLO needs a mesh of one dimension and Shard(0), but got {self.mesh} and {placements}"
        self.channels_cut = self.mesh is not None and not self.stack and self.tall
        self.m_cut = self.mesh is not None and not self.stack and not self.tall

    def part(self, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        return local.mT if self.tall else local

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """State of this shape for every matrix, laid out as the table above says."""
        whole = (*self.stack, *shape)
        if self.mesh is None:
            return torch.zeros(whole, device=self.device)
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import zeros as distributed_zeros

        moments = len(shape) == 2
        placement = Shard(0) if self.stack else Shard(1) if moments and self.channels_cut else Replicate()
        return distributed_zeros(whole, device_mesh=self.mesh, placements=[placement])

    def project(self, projection_RM: Tensor, grad_MN: Tensor) -> tuple[Tensor, Tensor]:
        """R = P G, and the length of each channel of G."""
        if not self.m_cut:
            return projection_RM @ grad_MN, vector_norm(grad_MN, dim=-2, keepdim=True)
        rows = -(-self.m // self.mesh.size())  # of every rank but the last ones
        start = self.mesh.get_local_rank() * rows
        projected_RN = projection_RM[:, start : start + rows] @ grad_MN
        squares_1N = vector_norm(grad_MN, dim=-2, keepdim=True).square_()
        both = self._sum(torch.cat([projected_RN, squares_1N], dim=-2))
        return both[..., :-1, :], both[..., -1:, :].sqrt_()

    def norm(self, x: Tensor) -> Tensor:
        """Over the channels of all ranks."""
        norm = vector_norm(x, dim=-1, keepdim=True)
        return self._sum(norm.square_()).sqrt_() if self.channels_cut else norm

    def _sum(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=self.mesh.get_group())
        return x


def _local(tensor: Tensor) -> Tensor:
    """This rank's memory of a DTensor; a plain tensor as it is."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _weight(beta: float, count: Tensor) -> Tensor:
    """1 - beta ** count, which fp32 would round to four digits for a beta of .999."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
