"""AdamW with both moments in 8 bits a number, by blocks.

As in the 8-bit optimizers' paper (arXiv 2110.02861), 256 numbers of a row share one fp32 scale, their maximum. Each is
stored as an index into a table of shares of the maximum, decoded for an update, and encoded again after it. Our tables
are evenly spaced in the logarithm; the paper's give most codes to the greatest decade and one to zero. The reasons:

- If a second moment rounded to zero and its first moment did not, the weight would move by lr * m / eps. So no share of
  the second moment is zero: the smallest, 1e-10, is the square of the first moment's smallest share, and updates stay
  as large as AdamW's.
- Neighbouring shares differ by a tenth everywhere. Without gradients a first moment shrinks by 1 - betas[0] a step. If
  that is less than half of the distance to the next share, as in the paper's lower decades, it is rounded back up, and
  the weight drifts for ever. With our table it fades for betas[0] up to 0.95.
- Features of a language model differ by a factor of a thousand, and their second moments by a million: small ones
  beside a large one keep different codes.

An update is within about 6 % (root mean square) of fp32 AdamW's, at beta2 = .95.

Vectors, and tensors of fewer than 4096 numbers (bitsandbytes' limit, too), keep fp32 moments: they are few. A row of
fewer than 256 numbers is one block, so narrow matrices need 8 bytes more for each row.

This is our own code because the libraries fail here. torchao 0.18's state is a tensor subclass that safetensors cannot
write, and its table has a zero: after gradients of 1 and 1e-4 in one block and then zeros, the weight with 1e-4 moves
by 4200 times lr. bitsandbytes 0.50 takes plain tensors, but its blocks cross rows, its table has a zero, and on the CPU
it stores 1e-8 of a block's maximum as 1.6e-5 of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.ops.byte_sizes import ROWS_8BIT, state_shapes
from tandem.optim.adamw import AdamW
from tandem.optim.update_rule import Slot, Whole
from tandem.spec.optim import AdamWSpec

_BLOCK = ROWS_8BIT


class AdamW8bit:
    by_rows = True

    def __init__(self, spec: AdamWSpec, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """`shapes`: the whole tensors' shapes, if this rank has only some of their rows or columns."""
        self._spec, self._adamw = spec, AdamW(spec)
        self._shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self._codes = {"exp_avg": Code.signed(), "exp_avg_sq": Code.positive()}

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        whole = self._shapes.get(name, like.shape)
        shapes = state_shapes("adamw_8bit", whole)
        if "exp_avg_scale" not in shapes:
            return self._adamw.init(name, like)
        numbers = math.prod(like.shape[1:])
        if numbers != math.prod(whole[1:]) and numbers % _BLOCK:
            raise SpecError(
                f"optimizer.kind = 'adamw_8bit': '{name}' is cut by columns, {numbers} for each rank, and a block of "
                f"{_BLOCK} numbers must be on one rank; choose 'adamw', or fewer ranks"
            )
        forms = {1: (like.shape, torch.uint8), 4: ((len(like), -(-numbers // _BLOCK)), torch.float32)}
        return {
            key: torch.zeros(forms[width][0], dtype=forms[width][1], device=like.device)
            for key, (_, width) in shapes.items()
        }

    def why_not_whole(self, live: Tensor) -> str:
        coded = live.ndim > 1 if self._shapes else "exp_avg_scale" in state_shapes("adamw_8bit", live.shape)
        if coded and live[0].numel() % _BLOCK:
            return f"a row of {live[0].numel()} numbers is not of whole blocks of {_BLOCK}"
        return self._adamw.why_not_whole(live)

    def update_whole(self, wholes: Sequence[Whole]) -> Tensor:
        from tandem.optim import adamw_8bit_triton  # triton exists where a GPU is

        coded = [whole for whole in wholes if "exp_avg_scale" in whole.state]
        plain = [whole for whole in wholes if "exp_avg_scale" not in whole.state]
        sums = [self._adamw.update_whole(plain)] if plain else []
        if coded:
            codes = (self._codes[moment].on(coded[0].live.device) for moment in ("exp_avg", "exp_avg_sq"))
            sums.append(adamw_8bit_triton.update(coded, self._spec, *codes))
        return torch.stack(sums).sum(0)

    def update(self, slots: Sequence[Slot]) -> None:
        coded = [slot for slot in slots if "exp_avg_scale" in slot.state]
        self._adamw.update([slot for slot in slots if "exp_avg_scale" not in slot.state])
        for slot in coded:  # one at a time: the decoded moments are 8 bytes a weight
            moments = {
                moment: code.decode(slot.state[moment], slot.state[f"{moment}_scale"])
                for moment, code in self._codes.items()
            }
            self._adamw.update([replace(slot, state=moments)])
            for moment, code in self._codes.items():
                code.encode(moments[moment], slot.state[moment], slot.state[f"{moment}_scale"])


class Code:
    """Stores numbers as indices of `shares` of their block's maximum; a share stands for all between two `bounds`."""

    def __init__(self, shares: Tensor, bounds: Tensor) -> None:
        assert len(bounds) + 1 == len(shares) <= 256
        self._tables = {shares.device: (shares, bounds)}

    @classmethod
    def positive(cls) -> Code:
        shares = torch.logspace(-10, 0, 256, dtype=torch.float32)
        return cls(shares, _between(shares))

    @classmethod
    def signed(cls) -> Code:
        """Replace the smallest of 128 shares by zero, so that a moment can fade out; its bounds stay."""
        shares = torch.logspace(-5, 0, 128, dtype=torch.float32)
        bounds, above = _between(shares), shares[1:]
        return cls(torch.cat([-above.flip(0), torch.zeros(1), above]), torch.cat([-bounds.flip(0), bounds]))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        shares, _ = self.on(codes.device)
        numbers = _in_blocks(shares.index_select(0, codes.flatten().int()).view(codes.shape))
        return _in_rows(numbers.mul_(scales.unsqueeze(-1)), codes)

    def encode(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the codes and scales of `numbers`, which are overwritten."""
        _, bounds = self.on(codes.device)
        blocks = _in_blocks(numbers)
        torch.linalg.vector_norm(blocks, torch.inf, dim=-1, out=scales)
        blocks.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))  # a block of zeros: not / 0
        codes.copy_(_in_rows(torch.bucketize(blocks, bounds, out_int32=True), codes))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            shares, bounds = next(iter(self._tables.values()))
            self._tables[device] = shares.to(device), bounds.to(device)
        return self._tables[device]


def _between(shares: Tensor) -> Tensor:
    return (shares[1:] + shares[:-1]) / 2


def _in_blocks(numbers: Tensor) -> Tensor:
    """Return [rows, ...] as [rows, blocks, 256], with the last block of a row padded with zeros."""
    rows = numbers.flatten(1)
    if missing := -rows.shape[1] % _BLOCK:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.unflatten(1, (-1, _BLOCK))


def _in_rows(blocks: Tensor, like: Tensor) -> Tensor:
    """Return the numbers of the blocks in the shape of `like`; contiguous, which torch's fused AdamW requires."""
    return blocks.flatten(1)[:, : like[0].numel()].contiguous().view(like.shape)
