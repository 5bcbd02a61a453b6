"""Keep the exact weights, when the weights that compute and are served have 16 bits.

A bf16 weight has 8 bits of precision, and most updates of RL are smaller than its last bit: added in place, they round
to zero. A master reads the exact value of a parameter (`read`), and stores a new one (`write`). Float32 parameters are
exact themselves, with every master.

Values are rounded to nearest, ties away from zero: add half a unit to the bit pattern and cut off the low 16 bits. The
rest is then a signed 16-bit number, which `SplitMaster` stores.
"""

from __future__ import annotations

import hashlib
from types import EllipsisType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

_HALF = 0x8000
Rows: TypeAlias = slice | EllipsisType
"""Rows of a parameter, along its first dimension; `...` is all of it."""


class Master(Protocol):
    """Reads and writes exact values. `live`, the parameter, may be a view of the engine's memory, with any strides."""

    halves: bool
    """Whether the bits of `live`, with the 16 bits of `state` if it has this name, are the exact value."""
    keeps_bits: bool
    """Whether `adopt` keeps the bits of the exact value that bf16 lacks, instead of rounding them away."""

    def adopt(self, name: str, exact: Tensor) -> Tensor:
        """Return the tensor to serve for the fp32 tensor `exact`."""
        ...

    def read(self, name: str, live: Tensor, rows: Rows = ...) -> Tensor:
        """Return the exact value in fp32, which the caller changes in place and passes to `write`."""
        ...

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None: ...
    def state(self) -> dict[str, Tensor]:
        """Return the tensors that are kept beside the live weights, not copies of them."""
        ...


class _NoState:
    halves = False
    keeps_bits = False

    def state(self) -> dict[str, Tensor]:
        return {}


class Float32(_NoState):
    """Float32 weights."""

    halves = True

    def adopt(self, name: str, exact: Tensor) -> Tensor:
        return exact

    def read(self, name: str, live: Tensor, rows: Rows = ...) -> Tensor:
        return live.detach()[rows]

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None:
        pass  # `value` is the parameter's own memory


class InPlace(_NoState):
    """bf16 only: what does not reach the last bit is lost."""

    def adopt(self, name: str, exact: Tensor) -> Tensor:
        return exact.to(torch.bfloat16)

    def read(self, name: str, live: Tensor, rows: Rows = ...) -> Tensor:
        return live.detach()[rows].float()  # float32 parameters: their own memory

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None:
        live.detach()[rows].copy_(value)


class Stochastic(InPlace):
    """bf16, rounded up or down at random, so that the mean is exact. Seed, name and step determine the draws."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None:
        if live.dtype == torch.float32:
            return
        start = rows.start if isinstance(rows, slice) else 0
        key = f"{self._seed}|{name}|{step}|{start}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        generator = torch.Generator(value.device).manual_seed(seed)
        noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
        # Adding less than one unit and cutting the lower half rounds up with a probability equal to the part cut off.
        bits = (value.view(torch.int32) + noise) >> 16
        live.detach()[rows].view(torch.int16).copy_(bits)


class Fp32Copy:
    """bf16 with a whole fp32 copy beside it."""

    halves = False
    keeps_bits = True

    def __init__(self) -> None:
        self._exact: dict[str, Tensor] = {}

    def adopt(self, name: str, exact: Tensor) -> Tensor:
        self._exact[name] = exact
        return round_half_away(exact)[0].view(torch.bfloat16)

    def read(self, name: str, live: Tensor, rows: Rows = ...) -> Tensor:
        return self._exact.get(name, live.detach())[rows]

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None:
        if name in self._exact:
            live.detach()[rows].view(torch.int16).copy_(round_half_away(value)[0])

    def state(self) -> dict[str, Tensor]:
        return self._exact


class SplitMaster:
    """bf16 with the other 16 bits of each weight beside it: together fp32 exactly, in 4 bytes and without a copy."""

    halves = True
    keeps_bits = True

    def __init__(self) -> None:
        self._low: dict[str, Tensor] = {}

    def adopt(self, name: str, exact: Tensor) -> Tensor:
        high, self._low[name] = round_half_away(exact)
        return high.view(torch.bfloat16)

    def read(self, name: str, live: Tensor, rows: Rows = ...) -> Tensor:
        if name not in self._low:
            return live.detach()[rows]
        high = live.detach()[rows].view(torch.int16).to(torch.int32)
        return high.bitwise_left_shift_(16).add_(self._low[name][rows]).view(torch.float32)

    def write(self, name: str, live: Tensor, rows: Rows, value: Tensor, step: int) -> None:
        if name in self._low:
            high, low = round_half_away(value)
            live.detach()[rows].view(torch.int16).copy_(high)
            self._low[name][rows] = low

    def state(self) -> dict[str, Tensor]:
        return self._low


def round_half_away(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the nearest bf16, and the difference of the fp32 bits from them; both int16."""
    bits = value.view(torch.int32)
    high = (bits + _HALF) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)
