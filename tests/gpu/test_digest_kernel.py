"""The kernel of digests against plain torch, to the bit. TRITON_INTERPRET=1 runs it without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tandem.ops import digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (torch.Size(shape).numel() * dtype.itemsize,))
    return values.to(torch.uint8).view(dtype).view(shape)


def parts_of(dtype: torch.dtype) -> list[digest.Piece]:
    """More than one tile each way, and every form in which a tensor is held."""
    torch.manual_seed(0)
    matrix = random(dtype, 70, 1104).to(DEVICE)
    return [
        ("matrix", matrix, 0, 0),
        ("elsewhere", matrix[:, :512], 2**33, 5),
        ("unaligned", matrix[3:, 1:1030], 3, 1),
        ("turned", matrix.t(), 1, 2),
        ("with gaps", matrix[::2, ::3], 0, 0),
        ("repeated", matrix[:1].expand(5, 1104), 0, 0),
        ("all alike", matrix[:1, :1].expand(5, 6), 0, 0),
        ("row with gaps", matrix[1:2, ::2], 0, 3),
        ("vector", matrix[0], 9, 0),
        ("column", matrix[:, 3], 0, 0),
        ("narrow", random(dtype, 130, 16).to(DEVICE), 0, 0),
        ("narrow and long", random(dtype, 1100, 16).to(DEVICE), 3, 2),
        ("narrow and unaligned", random(dtype, 270, 60).to(DEVICE)[:, 1:58], 0, 5),
        ("a fourth", random(dtype, 70, 200).to(DEVICE), 2**33, 0),
        ("cube", random(dtype, 4, 6, 8).to(DEVICE).transpose(1, 2), 1, 2),
        ("scalar", matrix[5, 5], 0, 0),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_numbers_of_plain_torch(dtype: torch.dtype) -> None:
    parts = parts_of(dtype)
    plain = [digest.piece(tensor.cpu(), name, row, col) for name, tensor, row, col in parts]
    assert digest._fused([digest.as_matrix(part) for part in parts], parts[0][1].device) == plain
    assert digest._fused([digest.for_kernel(part) for part in parts], parts[0][1].device) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_the_kernel_sees_what_is_no_number(dtype: torch.dtype, odd: float) -> None:
    from tandem.ops import digest_triton

    tensors = [torch.randn(70, 33).to(dtype).to(DEVICE) for _ in range(3)]
    tensors[1][69, 31] = odd
    matrices = [digest.for_kernel((str(n), tensor, 0, 0)) for n, tensor in enumerate(tensors)]
    table = digest_triton.Table(matrices, tensors[0].device, [digest._FIRST_ODD[dtype]] * 3)
    assert table.launch()[1].tolist() == [0, 1, 0]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_types_and_devices_in_one_call_are_told_apart() -> None:
    assert digest.why_not_fused() == ""
    parts = [part for dtype in DTYPES for part in parts_of(dtype)]
    mixed = [(name, tensor.cpu() if index % 3 else tensor, *at) for index, (name, tensor, *at) in enumerate(parts)]
    mixed.append(("empty", torch.zeros(0, 4, device=DEVICE), 0, 0))
    assert digest.pieces(mixed) == [digest.piece(tensor.cpu(), name, row, col) for name, tensor, row, col in mixed]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("checked", [False, True])
def test_stacks_of_turned_matrices_leave_the_others_their_table(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(digest.TOGETHER, "cuda", 3 * 40 * 24 * 2)
    stack = torch.randn(8, 24, 40, device=DEVICE).bfloat16()
    parts = [("a", torch.randn(70, 33, device=DEVICE), 0, 0), ("stack", stack.transpose(1, 2), 0, 0)]
    parts.append(("b", torch.randn(64, device=DEVICE).bfloat16(), 0, 0))
    again = digest.RepeatedDigest(parts, checked=checked)
    assert again._again is not None
    for _ in range(3):
        stack += 1
        numbers = [digest.piece(tensor.cpu().contiguous(), name, row, col) for name, tensor, row, col in parts]
        assert again.take() == digest.pieces(parts) == numbers
    if checked:
        assert again.look() == (numbers, [])
        stack[5, 3, 2] = float("nan")
        parts[2][1][7] = float("inf")
        assert sorted(again.look()[1]) == ["b", "stack"]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_what_the_stream_wrote_before_is_what_is_read() -> None:
    tensor = torch.zeros(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            tensor += 1
        found = digest.piece(tensor, "t")
    torch.cuda.synchronize()
    assert found == digest.piece(torch.full((4096, 4096), 50.0, dtype=torch.bfloat16), "t")


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("alone", [True, False])
def test_what_is_read_again_is_what_is_there_by_then(alone: bool) -> None:
    """By a graph, from the second time on, if nobody else computes; on whichever stream it is asked for."""
    tensors = {name: torch.zeros(300, 40 + n, device=DEVICE, dtype=torch.bfloat16) for n, name in enumerate("abc")}
    standing = digest.RepeatedDigest(
        ((name, tensor, 0, 0) for name, tensor in tensors.items()), checked=True, alone=alone
    )
    for turn in range(4):
        with torch.cuda.stream(torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()):
            for number, tensor in enumerate(tensors.values()):
                tensor.fill_(turn + number)
            tensors["b"][7, 7] = float("nan") if turn == 3 else 1.0
            numbers, odd = standing.look()
        assert numbers == [digest.piece(tensor.cpu(), name) for name, tensor in tensors.items()]
        assert odd == (["b"] if turn == 3 else [])
        assert (standing._again._replay._graph is not None) == (alone and turn > 0)


def test_what_would_be_of_a_copy_is_looked_up_each_time() -> None:
    numbers = torch.arange(24, dtype=torch.int64, device=DEVICE).view(4, 6)
    cube = torch.arange(24, dtype=torch.float32, device=DEVICE).view(2, 3, 4).transpose(1, 2)
    for tensor in (numbers[:, :3], cube):
        standing = digest.RepeatedDigest([("t", tensor, 0, 0)])
        for value in (1, 2):
            tensor.fill_(value)
            assert standing.take() == [digest.piece(tensor.cpu(), "t")]
