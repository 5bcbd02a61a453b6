"""A 64-bit digest of a tensor; digests of its slices and shards sum to it.

Every element's bits, read as a number, are multiplied by a weight that depends on the tensor's name and the element's
row and column, and summed modulo 2**64. So a permutation, a transposition, a flipped bit or a shard in the wrong place
changes the sum, and disjoint pieces of a tensor sum to the digest of the whole, in whatever layout they are served: a
slice of a fused projection, a tensor-parallel shard. It guards against accidents, not against forgers.

The first dimension counts as rows, all others together as columns; a vector is one column. On a GPU any number of
digests is one launch and one wait (ops/digest_triton.py); tensor by tensor a model's would be thousands of launches.
Shapes: R rows, C columns.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.ops.digest_layout import DigestMatrix, Plain
from tandem.ops.named_tensors import Finite, copied_to
from tandem.ops.option_report import requested
from tandem.ops.phase_timer import Phases

Piece = tuple[str, Tensor, int, int]
"""The name of a tensor, a part of it, and the row and column that the part begins at."""

_log = logging.getLogger(__name__)
_MASK = 2**64 - 1
_TEXT = "016x"
_CHUNK = {"cpu": 2**17}  # elements widened to 64 bits at a time: on a CPU they should stay in its cache
TOGETHER = {"cuda": 2**29}  # bytes of tensors that may exist only for their digest
_FIRST_ODD = {
    torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}  # fmt: skip
"""The smallest bits, without the sign, of an infinite value or NaN."""
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WITHOUT_SIGN = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class ElementChange(NamedTuple):
    """Elements of a tensor with other bits than before. The integers are the elements' bits; 8-byte elements count as
    two of 4 bytes."""

    name: str
    num_cols: int
    """Integers per row of the whole tensor."""
    index_N: Tensor
    """Position of each integer, counted row by row."""
    old_N: Tensor
    new_N: Tensor


@torch.no_grad()
def pieces(parts: Iterable[Piece]) -> list[int]:
    parts = list(parts)
    numbers = [0] * len(parts)
    on_gpu: defaultdict[torch.device, dict[int, DigestMatrix | Plain]] = defaultdict(dict)
    for index, part in enumerate(parts):
        tensor = part[1]
        if tensor.numel() and tensor.is_cuda and is_scattered(tensor) and not why_not_fused():
            numbers[index] = of_copies(part)
        elif tensor.numel() and tensor.is_cuda and not why_not_fused():
            on_gpu[tensor.device][index] = for_kernel(part)
        elif tensor.numel():
            numbers[index] = sum_of(as_matrix(part))
    for device, matrices in on_gpu.items():
        for index, number in zip(matrices, _fused(list(matrices.values()), device), strict=True):
            numbers[index] = number
    return numbers


def piece(tensor: Tensor, name: str, row_start: int = 0, col_start: int = 0) -> int:
    """Return the digest of the part of tensor `name` that begins at this row and column."""
    return pieces([(name, tensor, row_start, col_start)])[0]


def combine(pieces: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return digests of whole tensors from those of disjoint pieces."""
    whole: dict[str, int] = {}
    for name, digest in pieces:
        whole[name] = (whole.get(name, 0) + digest) & _MASK
    return whole


@torch.no_grad()
def changes(parts: Sequence[ElementChange]) -> list[int]:
    """Return what changed elements add to the digests of whole tensors, in time proportional to the changes. All parts
    lie on one device."""
    if not parts:
        return []
    device = parts[0].index_N.device
    seeds = torch.tensor([_seed_of(part.name) for part in parts], device=device)
    cols = torch.tensor([max(1, part.num_cols) for part in parts], device=device)
    counts = torch.tensor([len(part.index_N) for part in parts], device=device)
    part_N = torch.repeat_interleave(counts)
    index_N, seed_N, cols_N = torch.cat([part.index_N for part in parts]), seeds[part_N], cols[part_N]
    weight_N = _mixed(index_N % cols_N, seed_N) * _mixed(index_N // cols_N, ~seed_N)
    moved_N = torch.cat([_unsigned(part.new_N) - _unsigned(part.old_N) for part in parts])
    sums = torch.zeros(len(parts), dtype=torch.int64, device=device).index_add_(0, part_N, moved_N * weight_N)
    return [number & _MASK for number in sums.tolist()]


def text(number: int) -> str:
    """Return a digest as text: a fingerprint."""
    return format(number, _TEXT)


def texts(numbers: Iterable[int]) -> list[str]:
    return [format(number, _TEXT) for number in numbers]


def parted(joined: str) -> list[str]:
    """Split fingerprints that were joined into one text, which is faster in JSON than hundreds of numbers."""
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def side_by_side(proofs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Join what several workers, or ranks, each say of its part of every tensor."""
    names = dict.fromkeys(name for proof in proofs for name in proof)
    return {name: " | ".join(proof.get(name, "nothing") for proof in proofs) for name in names}


class RepeatedDigest:
    """Digests the same tensors again and again, by one thread at a time. On a GPU that is one launch and one wait, with
    a table that is built once. The tensors must not move."""

    def __init__(self, parts: Iterable[Piece], *, checked: bool = False, alone: bool = False) -> None:
        """`checked`: `look` will be called. `alone`: see Replay in ops/batched_launches.py."""
        self._parts = list(parts)
        self._checked = checked
        self._again: Any = None
        self._copied = [is_scattered(part[1]) for part in self._parts]
        table = [part for part, copied in zip(self._parts, self._copied, strict=True) if not copied]
        on_gpu = bool(table) and all(part[1].is_cuda and part[1].numel() for part in self._parts)
        if on_gpu and len({part[1].device for part in self._parts}) == 1 and not why_not_fused():
            self._again = _again(table, checked=checked, alone=alone)
        all_of_them = self._again is None or not checked
        self._looked_at = [
            part
            for part, copied in zip(self._parts, self._copied, strict=True)
            if all_of_them or copied or part[1].dtype not in _FIRST_ODD
        ]

    @torch.no_grad()
    def take(self) -> list[int]:
        if self._again is None:
            return pieces(self._parts)
        return self._with_copied(self._again.sums()[0])

    @torch.no_grad()
    def look(self) -> tuple[list[int], list[str]]:
        """Return the digests, and the names of tensors with values that are not finite."""
        finite = Finite()
        for name, tensor, *_ in self._looked_at:
            finite.add(name, tensor)
        if self._again is None or not self._checked:
            return self.take(), finite.odd()
        sums, wrong = self._again.sums()
        table = (part[0] for part, copied in zip(self._parts, self._copied, strict=True) if not copied)
        odd = [name for name, each in zip(table, wrong, strict=True) if each] if any(wrong) else []
        return self._with_copied(sums), [*odd, *finite.odd()]

    def _with_copied(self, sums: Sequence[int]) -> list[int]:
        """Return the digests of all, given those of the table."""
        of_table = iter(sums)
        of_copies = iter(pieces(part for part, copied in zip(self._parts, self._copied, strict=True) if copied))
        return [next(of_copies) if copied else next(of_table) & _MASK for copied in self._copied]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    numbers = pieces((name, tensor, 0, 0) for name, tensor in tensors.items())
    return dict(zip(tensors, texts(numbers), strict=True))


def fingerprints_of_host(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, str]:
    """Return fingerprints of tensors on the host. A GPU takes them of a copy of their own, so an error in the second
    copy, which is served, is still found."""
    if device.type != "cuda" or why_not_fused():
        return fingerprints(tensors)
    return fingerprints(copied_to(device, tensors))


def fingerprinted(
    tensors: Iterable[tuple[str, Tensor]], phases: Phases | None = None
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield tensors with their fingerprints. Tensors that are created during iteration are held in batches of limited
    size. In `phases`, creating them counts as `gather`, digesting them as `hash`."""
    held: list[tuple[str, Tensor]] = []
    held_bytes = 0
    for name, tensor in tensors:
        held.append((name, tensor))
        held_bytes += tensor.nbytes
        if held_bytes >= TOGETHER.get(tensor.device.type, 0):
            yield from _with_text(held, phases)
            held, held_bytes = [], 0
    yield from _with_text(held, phases)


@torch.no_grad()
def all_at_once(
    tensors: Iterable[tuple[str, Tensor]], phases: Phases | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return fingerprints, and the names of tensors with values that are not finite. As `fingerprinted`, but no tensor
    is used while its digest is taken, so the GPU is waited for once, at the end."""
    found: dict[str, str] = {}
    launched: list[tuple[list[str], Tensor]] = []
    finite, phases = Finite(), phases or Phases()
    held: list[Piece] = []

    def launch() -> None:
        launched.append(([name for name, *_ in held], _table_of(held, checked=True).launch()))
        held.clear()  # freed memory is only reused by work that is enqueued later

    held_bytes = 0
    for name, tensor in tensors:
        if not tensor.is_cuda or not tensor.numel() or why_not_fused():
            found[name] = text(piece(tensor, name))
            finite.add(name, tensor)
            continue
        if held and (tensor.device != held[0][1].device or held_bytes >= TOGETHER["cuda"]):
            launch()
            held_bytes = 0
        found[name] = ""
        held.append((name, tensor, 0, 0))
        held_bytes += tensor.nbytes
        if tensor.dtype not in _FIRST_ODD:
            finite.add(name, tensor)
    if held:
        launch()
    phases.end("gather")
    odd = finite.odd()
    for names, out in launched:
        sums, wrong = out.tolist()
        found |= {name: text(number & _MASK) for name, number in zip(names, sums, strict=True)}
        odd += [name for name, each in zip(names, wrong, strict=True) if each]
    phases.end("hash")
    return found, odd


def fused(device: torch.device) -> dict[str, Any]:
    """Report whether digests on this device use one fused kernel; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return requested(True, why_not_fused())


@cache
def why_not_fused() -> str:
    """Return why digests on a GPU cannot use the fused kernel; empty if they can."""
    probe = as_matrix(("probe", torch.arange(-8, 8, dtype=torch.int16, device="cuda").view(2, 8), 5, 7))
    try:
        why_not = (
            "" if _fused([probe], probe.integers_RC.device) == [sum_of(probe)] else "the kernel's numbers are others"
        )
    except Exception as error:  # noqa: BLE001 - a compiler runs here, and may lack its tools or a place for its files
        why_not = f"{type(error).__name__}: {error}"
    if why_not:
        _log.warning("digests are computed tensor by tensor: %s", why_not)
    return why_not


def _fused(matrices: Sequence[DigestMatrix | Plain], device: torch.device) -> list[int]:
    from tandem.ops import digest_triton  # triton exists where a GPU is

    return [number & _MASK for number in digest_triton.Table(matrices, device).launch()[0].tolist()]


def _table_of(parts: Sequence[Piece], *, checked: bool) -> Any:
    """`checked`: also look for values that are not finite. All parts are on one GPU."""
    from tandem.ops import digest_triton  # triton exists where a GPU is

    limits = [_FIRST_ODD.get(tensor.dtype, digest_triton.NO_LIMIT) for _, tensor, *_ in parts] if checked else None
    return digest_triton.Table([for_kernel(part) for part in parts], parts[0][1].device, limits)


def _again(parts: Sequence[Piece], *, checked: bool, alone: bool) -> Any:
    """Return a repeatable table; None if any part had to be copied, because the copy would not follow the tensor."""
    from tandem.ops import digest_triton  # triton exists where a GPU is

    table, theirs = _table_of(parts, checked=checked), {part[1].untyped_storage().data_ptr() for part in parts}
    if any(read.untyped_storage().data_ptr() not in theirs for read in table.held):
        return None
    return digest_triton.Again(table, alone=alone)


def is_scattered(tensor: Tensor) -> bool:
    """Return whether a row is no run of memory, as in a stack of transposed matrices: it is read from a copy."""
    return tensor.ndim > 2 and bool(tensor.numel()) and not tensor[0].is_contiguous()


def of_copies(part: Piece) -> int:
    """Return the digest of a scattered tensor: of some rows after the others, so that no copy is large."""
    name, tensor, row_start, col_start = part
    step = max(1, TOGETHER["cuda"] // tensor[0].nbytes)
    chunks = ((top, tensor[top : top + step]) for top in range(0, len(tensor), step))
    found = (_fused([as_matrix((name, rows, row_start + top, col_start))], tensor.device)[0] for top, rows in chunks)
    return sum(found) & _MASK


def _with_text(held: Sequence[tuple[str, Tensor]], phases: Phases | None) -> Iterator[tuple[str, Tensor, str]]:
    phases = phases or Phases()
    if held and held[-1][1].is_cuda:  # the kernels that create them may still run
        torch.cuda.current_stream(held[-1][1].device).synchronize()
    phases.end("gather")
    numbers = pieces((name, tensor, 0, 0) for name, tensor in held)
    phases.end("hash")
    return ((name, tensor, text(number)) for (name, tensor), number in zip(held, numbers, strict=True))


def as_matrix(part: Piece) -> DigestMatrix:
    name, tensor, row_start, col_start = part
    values_RC = tensor.detach().reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    if values_RC.element_size() == 8:
        # As two columns each: multiplied by an odd weight, the top one of 64 bits stays where it is, and two flipped
        # signs would cancel.
        values_RC, col_start = values_RC.contiguous().view(torch.int32), 2 * col_start
    seed = _seed_of(name)
    return DigestMatrix(values_RC.view(_AS_INTEGER[values_RC.element_size()]), ~seed, seed, row_start, col_start)


def for_kernel(part: Piece) -> DigestMatrix | Plain:
    """Describe a tensor without creating views, which for hundreds of tensors takes longer than reading the bytes."""
    name, tensor, row_start, col_start = part
    width, shape, seed = tensor.element_size(), tensor.shape, _seed_of(name)
    if width not in _AS_INTEGER or not shape:
        return as_matrix(part)
    if len(shape) == 1:
        if tensor.stride(0) != 1:
            return as_matrix(part)
        return Plain(tensor.data_ptr(), width, 1, shape[0], 0, seed, ~seed, col_start, row_start)  # turned: one row
    if len(shape) == 2 and tensor.stride() == (1, pitch := tensor.stride(1)) and pitch > 1 and shape[0] > 1:
        return Plain(tensor.data_ptr(), width, shape[1], shape[0], pitch, seed, ~seed, col_start, row_start)  # turned
    if tensor.is_contiguous() or (len(shape) == 2 and tensor.stride(1) == 1):
        pitch = tensor.stride(0)
    else:
        return as_matrix(part)
    rows, cols = shape[0], tensor.numel() // shape[0]
    if cols == 1:
        return as_matrix(part)
    pitch = pitch if rows > 1 else 0
    return Plain(tensor.data_ptr(), width, rows, cols, pitch, ~seed, seed, row_start, col_start)


@lru_cache(2**16)
def _seed_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)


def _unsigned(integers: Tensor) -> Tensor:
    """Widen to 64 bits without sign: -1 and 1 must not cancel each other."""
    return integers.view(_WITHOUT_SIGN[integers.element_size()]).to(torch.int64)


def sum_of(matrix: DigestMatrix) -> int:
    """Compute a digest in plain torch: used on a CPU, and as the reference of the kernel."""
    integers_RC = matrix.integers_RC
    num_rows, num_cols = integers_RC.shape
    device = integers_RC.device
    cols_C = _weights(matrix.col_seed, matrix.col_start, num_cols, device)
    rows_R = _weights(matrix.row_seed, matrix.row_start, num_rows, device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = max(1, _CHUNK.get(device.type, 2**26) // num_cols)
    for start in range(0, num_rows, step):
        wide_RC = _unsigned(integers_RC[start : start + step])
        # The product of integers is several times as fast, and there is none on a GPU.
        sums_R = wide_RC @ cols_C if device.type == "cpu" else wide_RC.mul_(cols_C).sum(1)
        total += (sums_R * rows_R[start : start + step]).sum()
    return int(total.item()) & _MASK


@lru_cache(4096)  # a few numbers of each tensor; making them took longer than the sums of a small model
def _weights(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return odd 64-bit weights: splitmix64 of the position, started at the seed."""
    return _mixed(torch.arange(start, start + count, dtype=torch.int64, device=device), seed)


def _mixed(at: Tensor, seed: int | Tensor) -> Tensor:
    z = at * _GOLDEN + seed
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return (z ^ ((z >> 31) & (2**33 - 1))) | 1


_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64's, signed
