"""A worker of vLLM's writes the boxes that it got over what it serves: all of its own, or none. No vLLM is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.errors import SyncError
from tandem.types import Part
from tandem.vllm_worker import served_memory
from tandem.vllm_worker.served_memory import TensorLayout, TensorPiece

WHOLE = {
    "q": torch.arange(32.0).view(8, 4),
    "k": torch.arange(16.0).view(4, 4) + 100,
    "o": torch.arange(24.0).view(4, 6),
}
NORM = torch.arange(4.0)


def second_worker() -> tuple[TensorLayout, dict[str, torch.Tensor]]:
    """Of two: the lower rows of a fused parameter of q and k, the right columns of o, a norm."""
    memory = {"qk": torch.zeros(6, 4), "o": torch.zeros(4, 3), "norm": torch.zeros(4)}
    pieces = [
        TensorPiece("q", "qk", memory["qk"][:4], 4, 0, (8, 4)),
        TensorPiece("k", "qk", memory["qk"][4:], 2, 0, (4, 4)),
        TensorPiece("o", "o", memory["o"], 0, 3, (4, 6)),
        TensorPiece("norm", "norm", memory["norm"], 0, 0, (4,)),
    ]
    return TensorLayout({piece.name: [piece] for piece in pieces}, {}, (), {}), memory


def arrived() -> Iterator[Part]:
    yield Part("norm", NORM, 0, 0, (4,))
    yield Part("q", WHOLE["q"][4:].clone(), 4, 0, (8, 4))
    yield Part("k", WHOLE["k"][2:].clone(), 2, 0, (4, 4))
    yield Part("o", WHOLE["o"][:, 3:].clone(), 0, 3, (4, 6))


def test_its_boxes_are_what_it_serves() -> None:
    layout, _ = second_worker()
    assert layout.boxes() == [("q", 4, 8, 0, 4), ("k", 2, 4, 0, 4), ("o", 0, 4, 3, 6), ("norm", 0, 4, 0, 1)]


def test_each_box_goes_to_its_memory() -> None:
    layout, memory = second_worker()
    served_memory.write(layout, {}, served_memory.moves_of_parts(layout, list(arrived())))
    assert torch.equal(memory["qk"], torch.cat((WHOLE["q"][4:], WHOLE["k"][2:])))
    assert torch.equal(memory["o"], WHOLE["o"][:, 3:])
    assert torch.equal(memory["norm"], NORM)


FAULTS: dict[str, tuple[Callable[[Part], Part | None], str]] = {
    "another worker's rows": (
        lambda part: part._replace(row_start=0),
        r"'q', rows and columns \[0, 4, 0, 4\], is no box",
    ),
    "off by one": (lambda part: part._replace(row_start=3), r"'q', rows and columns \[3, 7, 0, 4\], is no box"),
    "columns": (lambda part: part._replace(tensor=part.tensor.t(), row_start=0), "'q', rows and columns"),
    "left out": (lambda part: None, r"'q', rows and columns \[4, 8, 0, 4\], did not arrive"),
    "another type": (lambda part: part._replace(tensor=part.tensor.half()), "a box of 'q' arrived as torch.float16"),
    "another shape": (lambda part: part._replace(full_shape=(9, 4)), r"a box of 'q' arrived as .* of \[9, 4\]"),
    "another name": (lambda part: part._replace(name="v"), "a box of 'v' arrived .* served as nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_exactly_its_own_is_refused_before_anything_is_written(fault: str) -> None:
    change, says = FAULTS[fault]
    layout, memory = second_worker()
    parts = [new for part in arrived() if (new := change(part) if part.name == "q" else part) is not None]
    with pytest.raises(SyncError, match=says):
        served_memory.moves_of_parts(layout, parts)
    assert not any(tensor.any() for tensor in memory.values())
