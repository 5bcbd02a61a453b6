"""Digests against an independent one in Python's own integers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.adapter_base_check import check_base
from tandem.ops.digest_layout import DigestMatrix
from tandem.ops.phase_timer import Phases

DTYPES = ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int8", "uint8", "bool", "float8_e4m3fn"]
WHOLE = 2**64


def weight(seed: int, position: int) -> int:
    z = (seed + position * 0x9E3779B97F4A7C15) % WHOLE
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WHOLE
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WHOLE
    return (z ^ (z >> 31)) | 1


def slow(name: str, tensor: Tensor, row_start: int = 0, col_start: int = 0) -> int:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    rows = tensor.shape[0] if tensor.ndim else 1
    cols = tensor.numel() // rows if rows else 0
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    width, halves = (4, 2) if tensor.element_size() == 8 else (tensor.element_size(), 1)
    total = 0
    for row in range(rows):
        for col in range(cols * halves):
            at = (row * cols * halves + col) * width
            number = int.from_bytes(raw[at : at + width], "little")
            total += number * weight(seed, col_start * halves + col) * weight(~seed % WHOLE, row_start + row)
    return total % WHOLE


def random(dtype: str, *shape: int) -> Tensor:
    kind = getattr(torch, dtype)
    values = torch.randint(0, 2 if dtype == "bool" else 256, (torch.Size(shape).numel() * kind.itemsize,))
    return values.to(torch.uint8).view(kind).view(shape)


def parts_of(dtype: str) -> list[digest.Piece]:
    """Of every form in which a tensor is held."""
    torch.manual_seed(0)
    matrix = random(dtype, 6, 10)
    return [
        ("matrix", matrix, 0, 0),
        ("elsewhere", matrix, 2**33, 5),
        ("slice of a fused one", matrix[:, 2:5], 0, 2),
        ("turned", matrix.t(), 3, 0),
        ("with gaps", matrix[::2, ::3], 0, 0),
        ("repeated", matrix[:1].expand(4, 10), 0, 0),
        ("vector", matrix[0], 7, 0),
        ("column", matrix[:, :1], 0, 1),
        ("cube", random(dtype, 2, 3, 4), 1, 2),
        ("stack of turned ones", random(dtype, 2, 3, 4).transpose(1, 2), 1, 2),
        ("scalar", matrix[0, 0], 0, 0),
        ("empty", matrix[:0], 0, 0),
        ("no columns", matrix[:, :0], 4, 0),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_at_once_is_one_by_one_is_the_slow_one(dtype: str) -> None:
    parts = parts_of(dtype)
    one_by_one = [digest.piece(tensor, name, row, col) for name, tensor, row, col in parts]
    assert digest.pieces(parts) == one_by_one == [slow(*part) for part in parts]


def test_a_scattered_tensor_is_copied_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def plain(matrices: Sequence[DigestMatrix], device: torch.device) -> list[int]:
        copied.extend(matrix.integers_RC.numel() for matrix in matrices)
        return [digest.sum_of(matrix) for matrix in matrices]

    monkeypatch.setattr(digest, "_fused", plain)
    monkeypatch.setitem(digest.TOGETHER, "cuda", 100)
    stack = random("float32", 7, 3, 4).transpose(1, 2)
    assert digest.of_copies(("stack", stack, 5, 2)) == slow("stack", stack, 5, 2)
    assert copied == [24, 24, 24, 12]
    assert [digest.is_scattered(each) for each in (stack, stack.contiguous(), stack[0], stack[:0])] == [
        True, False, False, False,
    ]  # fmt: skip


def test_what_is_read_from_copies_stands_at_its_place_among_a_table_s() -> None:
    stack = random("int8", 2, 3, 4).transpose(1, 2)
    parts = [("a", random("int8", 6), 0, 0), ("stack", stack, 0, 0), ("b", random("int8", 4, 4), 0, 0)]
    again = digest.RepeatedDigest(parts, checked=True)
    plain = again.take()
    again._again = SimpleNamespace(sums=lambda: ([plain[0], plain[2] - 2**64], [0, 1]))  # of a GPU: signed
    assert again.take() == plain
    assert again.look() == (plain, ["b"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_sum_to_the_whole(dtype: str) -> None:
    whole = random(dtype, 6, 10)
    shards = [(row, col) for row in (0, 2) for col in (0, 3, 4)]
    rows, cols = {0: 2, 2: 6}, {0: 3, 3: 4, 4: 10}
    parts = [("w", whole[row : rows[row], col : cols[col]], row, col) for row, col in shards]
    summed = digest.combine(("w", number) for number in digest.pieces(parts))
    assert summed == {"w": digest.piece(whole, "w")} == {"w": slow("w", whole)}


def test_fingerprints_are_sixteen_digits_of_each_tensor_in_its_order() -> None:
    tensors = {"b": random("bfloat16", 3, 4), "empty": torch.zeros(0, 4), "a": torch.tensor(2.5)}
    found = digest.fingerprints(tensors)
    assert found == {name: f"{slow(name, tensor):016x}" for name, tensor in tensors.items()}
    made = list(digest.fingerprinted(iter(tensors.items())))
    assert [(name, text) for name, _, text in made] == list(found.items())
    assert all(tensor is tensors[name] for name, tensor, _ in made)


def test_to_make_tensors_and_to_digest_them_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def slowly(parts: Iterable[digest.Piece]) -> list[int]:
        numbers = [0 for _ in parts]
        takes(5.0 * len(numbers))
        return numbers

    def made() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            takes(1)
            yield name, torch.ones(2)

    monkeypatch.setattr(digest, "pieces", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    phases = Phases()
    for _ in digest.fingerprinted(made(), phases):
        takes(2)
        phases.end("move")
    assert phases.seconds == {"gather": 3, "hash": 15, "move": 6}


# --- the base under adapters


def reply(base: dict[str, Tensor]) -> dict[str, object]:
    layout = {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in base.items()}
    return {"base": digest.fingerprints(base), "layout": layout}


def test_every_engines_base_is_compared_in_the_type_that_it_serves() -> None:
    base = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    narrow = {name: tensor.bfloat16() for name, tensor in base.items()}
    good = [reply(base), reply(narrow), reply(base | {"b": narrow["b"]}), {"layout": {}}]
    check_base(base.items(), good)
    for odd in (
        reply(narrow | {"b": narrow["b"] + 1}),
        reply({"a": narrow["a"]}),
        reply(narrow | {"c": narrow["b"]}),
        {"base": reply(base)["base"]},
    ):
        with pytest.raises(SyncError, match="base model is not the trainer"):
            check_base(base.items(), [*good, odd])


def test_the_base_is_gone_through_once() -> None:
    base = {"a": torch.randn(3, 4)}
    asked: list[str] = []
    check_base(((name, asked.append(name) or tensor) for name, tensor in base.items()), [reply(base)] * 3)
    check_base(((name, asked.append(name) or tensor) for name, tensor in base.items()), [{}])
    assert asked == ["a"]
