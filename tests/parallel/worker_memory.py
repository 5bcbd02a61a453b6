"""Stand-ins for vLLM's tensor-parallel workers: memory as vLLM lays it out, and shared as its workers share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.shared.receiver import SharedEnd
from tandem.engine.vllm.weight_update import whole
from tandem.ops import digest
from tandem.ops.parts import Box, Cut, box_of_rank

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
Shapes = Mapping[str, tuple[int, ...]]


def cut_of(name: str) -> Cut:
    """As vLLM's documentation has it; tandem.model.engine_cuts says it in its own way."""
    if "norm" in name:
        return "whole"
    return "cols" if ".o_proj." in name or ".down_proj." in name else "rows"


class Worker:
    """Worker `number` of `count`. q, k, v and gate, up are rows of one tensor each."""

    def __init__(self, link: Mapping[str, Any], shapes: Shapes, number: int, count: int) -> None:
        self.boxes = {name: box_of_rank(shape, number, count, cut_of(name)) for name, shape in shapes.items()}
        fused: dict[str, list[str]] = {}
        for name in shapes:
            owner, _, last = name.removesuffix(".weight").rpartition(".")
            fused.setdefault(f"{owner}.{_FUSED.get(last, last)}", []).append(name)
        self.end = SharedEnd(link)
        params = {path: torch.zeros(self._rows(names), *self._rest(names[0], shapes)) for path, names in fused.items()}
        memory = self.end.memory_for(params)
        self.tensors: dict[str, Tensor] = {}
        for path, names in fused.items():
            lengths = [self.boxes[name].bottom - self.boxes[name].top for name in names]
            self.tensors |= dict(zip(names, memory[path].split(lengths), strict=True))
        self.end.lend(self.tensors)
        self.end.attached({})

    def pieces(self) -> list[tuple[str, int, int, int, int, int]]:
        """Digests of what is served, as a worker reports them."""
        parts = [(name, each, self.boxes[name].top, self.boxes[name].left) for name, each in self.tensors.items()]
        return [
            (name, *self.boxes[name], number) for (name, *_), number in zip(parts, digest.pieces(parts), strict=True)
        ]

    def _rows(self, names: list[str]) -> int:
        return sum(self.boxes[name].bottom - self.boxes[name].top for name in names)

    def _rest(self, name: str, shapes: Shapes) -> list[int]:
        box: Box = self.boxes[name]
        return [box.right - box.left] if len(shapes[name]) > 1 else []


def reply_of(workers: list[Worker], derived: list[str]) -> dict[str, Any]:
    """What an engine says when it is attached."""
    return {
        "handles": [worker.end.reply["handles"] for worker in workers],
        "boxes": [[(name, *box) for name, box in worker.boxes.items()] for worker in workers],
        "derived": derived,
    }


def served(workers: list[Worker], shapes: Shapes) -> dict[str, str]:
    """Digests of whole tensors, as the engine combines them."""
    pieces = [piece for worker in workers for piece in worker.pieces()]
    return whole(pieces, {name: [*shape] for name, shape in shapes.items()})
