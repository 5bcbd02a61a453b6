# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""AdamW's whole update in one launch over any number of parameters: each byte is read and written once.

The kernel reads value, moments and gradient in place, a bf16 weight together with the 16 bits that it lacks, and also
sums what optim/optimizer.py reports about an update. A program works on a stretch of one parameter; a table says which.
Imported only where tensors are on a GPU.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.optim.update_rule import Whole
from tandem.spec.optim import AdamWSpec

_BLOCK, _BLOCKS = 1024, 8  # numbers at a time, and how many times


def update(wholes: Sequence[Whole], spec: AdamWSpec) -> Tensor:
    """Update `wholes`. Return six sums: the update's energy, the energy lost, and how many numbers have a gradient,
    have one and changed, are served with other bits, changed."""
    kinds: defaultdict[tuple[bool, bool, bool], list[Whole]] = defaultdict(list)
    for whole in wholes:
        parts = (whole.live, whole.grad, *whole.state.values(), *([] if whole.low is None else [whole.low]))
        aligned = whole.live.numel() % 16 == 0 and not any(tensor.data_ptr() % 16 for tensor in parts)
        kinds[whole.low is not None, whole.grad.dtype == torch.bfloat16, aligned].append(whole)
    sums = [_launch(alike, spec, *kind) for kind, alike in kinds.items()]
    return torch.stack(sums).sum(0)


def _launch(wholes: Sequence[Whole], spec: AdamWSpec, split: bool, narrow: bool, aligned: bool) -> Tensor:
    owners, table, floats, sums = tables(wholes, spec, ("exp_avg", "exp_avg_sq"), _BLOCK * _BLOCKS)
    with torch.cuda.device_of(table):
        _update[(len(owners),)](
            table, floats, owners, sums, *spec.betas, *(1 - beta for beta in spec.betas), spec.eps,
            SPLIT=split, NARROW=narrow, ALIGNED=aligned, BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=4,
        )  # fmt: skip
    return sums.sum(0, dtype=torch.float64)


def tables(wholes: Sequence[Whole], spec: AdamWSpec, state: Sequence[str], stretch: int) -> tuple[Tensor, ...]:
    """Return a kernel's arguments: the parameter of each stretch; each parameter's addresses; its learning rate and
    other numbers of this step; memory for the sums of each stretch. `stretch`: its length in numbers."""
    device = wholes[0].live.device
    owners, firsts = _tiles(tuple(whole.live.numel() for whole in wholes), stretch, device)
    places, numbers = array("q"), array("f")
    for whole, first in zip(wholes, firsts, strict=True):
        low = whole.live if whole.low is None else whole.low
        places.extend(tensor.data_ptr() for tensor in (whole.live, low, whole.grad))
        places.extend((whole.live.numel(), first, *(whole.state[key].data_ptr() for key in state)))
        beta1, beta2 = (1 - beta**whole.step for beta in spec.betas)
        numbers.extend((whole.lr / beta1, whole.lr * whole.decay, 1 / sqrt(beta2), whole.scale))
    table = torch.frombuffer(places, dtype=torch.int64).to(device)
    floats = torch.frombuffer(numbers, dtype=torch.float32).to(device)
    return owners, table, floats, torch.empty(len(owners), 6, device=device)


@lru_cache(16)
def _tiles(sizes: tuple[int, ...], stretch: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the parameter of each stretch, and the first stretch of each parameter."""
    counts = torch.tensor([-(-size // stretch) for size in sizes])
    owners = torch.repeat_interleave(counts).to(torch.int32).to(device)
    return owners, (counts.cumsum(0) - counts).tolist()


@triton.jit
def places_of(table, owner, STATE: tl.constexpr, SPLIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a parameter's row of `tables`: its pointers, how many numbers it has, its first stretch, and the address
    of the `STATE` pointers of its state."""
    mine = table + owner * (5 + STATE)
    live = tl.load(mine).to(tl.pointer_type(tl.int16 if SPLIT else tl.float32))
    low = tl.load(mine + 1).to(tl.pointer_type(tl.int16))
    grad = tl.load(mine + 2).to(tl.pointer_type(tl.bfloat16 if NARROW else tl.float32))
    count, first = tl.load(mine + 3), tl.load(mine + 4)
    if ALIGNED:  # here: the compiler does not infer it across calls, and would read numbers one by one
        live, low, grad = tl.multiple_of(live, 16), tl.multiple_of(low, 16), tl.multiple_of(grad, 16)
        count = tl.multiple_of(count, 16)
    return live, low, grad, count, first, mine + 5


@triton.jit
def numbers_of(floats, owner):
    """Return a parameter's step size, decay, bias correction and gradient scale of this step."""
    mine = floats + owner * 4
    return tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)


@triton.jit
def read(live, low, at, inside, SPLIT: tl.constexpr):
    """Return the served bits, and the exact value."""
    then = tl.load(live + at, mask=inside, other=0)
    if SPLIT:
        low_bits = tl.load(low + at, mask=inside, other=0)
        old = ((then.to(tl.int32) << 16) + low_bits.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        old = then
    return then, old


@triton.jit
def stepped(old, mean, square, step_size, decay, unbiased, eps):
    new = old - decay * old
    return new - step_size * mean / (tl.sqrt(square) * unbiased + eps)


@triton.jit
def write(live, low, at, inside, new, SPLIT: tl.constexpr):
    """Store the value. Return the value that is kept, and the bits that are now served."""
    if SPLIT:
        bits = new.to(tl.int32, bitcast=True)
        serves = ((bits + 0x8000) >> 16).to(tl.int16)
        new_low = (bits - (serves.to(tl.int32) << 16)).to(tl.int16)
        tl.store(live + at, serves, mask=inside)
        tl.store(low + at, new_low, mask=inside)
        kept = ((serves.to(tl.int32) << 16) + new_low.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        tl.store(live + at, new, mask=inside)
        kept = new
        serves = new
    return kept, serves


@triton.jit
def _update(
    table, floats, owners, sums, beta1, beta2, rest1, rest2, eps,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    live, low, grad, count, first, state = places_of(table, owner, 2, SPLIT, NARROW, ALIGNED)
    first_moment = tl.load(state).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(state + 1).to(tl.pointer_type(tl.float32))
    step_size, decay, unbiased, scale = numbers_of(floats, owner)
    if ALIGNED:
        first_moment, second_moment = tl.multiple_of(first_moment, 16), tl.multiple_of(second_moment, 16)
    energy = tl.zeros([BLOCK], dtype=tl.float32)
    lost = tl.zeros([BLOCK], dtype=tl.float32)
    pulled = tl.zeros([BLOCK], dtype=tl.int32)
    moved = tl.zeros([BLOCK], dtype=tl.int32)
    served = tl.zeros([BLOCK], dtype=tl.int32)
    stored = tl.zeros([BLOCK], dtype=tl.int32)
    start = (tile - first).to(tl.int64) * (BLOCK * BLOCKS)
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        then, old = read(live, low, at, inside, SPLIT)
        pull = tl.load(grad + at, mask=inside, other=0).to(tl.float32) * scale
        mean = tl.load(first_moment + at, mask=inside, other=0)
        square = tl.load(second_moment + at, mask=inside, other=0)
        mean = beta1 * mean + rest1 * pull
        square = beta2 * square + rest2 * pull * pull
        new = stepped(old, mean, square, step_size, decay, unbiased, eps)
        tl.store(first_moment + at, mean, mask=inside)
        tl.store(second_moment + at, square, mask=inside)
        way = new - old
        energy += way * way
        kept, serves = write(live, low, at, inside, new, SPLIT)
        lost += (new - kept) * way
        served += (serves != then).to(tl.int32)
        changed = (kept != old).to(tl.int32)
        has_pull = (pull != 0).to(tl.int32)
        pulled += has_pull
        moved += has_pull & changed
        stored += changed
    out = sums + tile * 6
    tl.store(out, tl.sum(energy))
    tl.store(out + 1, tl.sum(lost))
    tl.store(out + 2, tl.sum(pulled).to(tl.float32))
    tl.store(out + 3, tl.sum(moved).to(tl.float32))
    tl.store(out + 4, tl.sum(served).to(tl.float32))
    tl.store(out + 5, tl.sum(stored).to(tl.float32))
