"""Micro-batches as bytes: a length, a JSON header, then the tensors one behind the other. For ranks of one trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from tandem.types import MicroBatch, PackedRows, Spans

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.bool}
_HEAD = 8
_ALIGNED = 16


def pack(micros: Sequence[MicroBatch | None]) -> Tensor:
    """One flat uint8 tensor on the host."""
    places: list[Any] = []
    payload: list[Tensor] = []
    size = 0

    def place(tensor: Tensor | None) -> Any:
        nonlocal size
        if tensor is None:
            return None
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        at, size = size, size + data.numel() + -data.numel() % _ALIGNED
        payload.extend([data, torch.zeros(size - at - data.numel(), dtype=torch.uint8)])
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at]

    for micro in micros:
        if micro is None:
            places.append(None)
            continue
        starts_q, starts_k, longest_q, longest_k, keys = micro.packed.spans
        places.append(
            {
                "tensors": {name: place(getattr(micro, name)) for name in _TENSORS},
                "spans": [place(starts_q), place(starts_k), longest_q, longest_k, place(keys)],
                "packed": [place(micro.packed.tokens_T), place(micro.packed.place_of)],
                "hold": micro.hold,
                "kl": micro.kl,
            }
        )
    head = json.dumps(places).encode()
    head += b" " * (-(len(head) + _HEAD) % _ALIGNED)
    front = torch.frombuffer(bytearray(len(head).to_bytes(_HEAD, "little") + head), dtype=torch.uint8)
    return torch.cat([front, *payload])


def unpack(data: Tensor, device: torch.device) -> list[MicroBatch | None]:
    length = int.from_bytes(bytes(data[:_HEAD].tolist()), "little")
    places = json.loads(bytes(data[_HEAD : _HEAD + length].tolist()))
    body = data[_HEAD + length :]

    def tensor(place: Any) -> Any:
        if place is None:
            return None
        name, shape, at = place
        dtype = _DTYPES[name]
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        return body[at : at + count].view(dtype).view(shape).to(device)

    def micro(told: Any) -> MicroBatch | None:
        if told is None:
            return None
        starts_q, starts_k, longest_q, longest_k, keys = told["spans"]
        spans = cast("Spans", (tensor(starts_q), tensor(starts_k), longest_q, longest_k, tensor(keys)))
        packed = PackedRows(spans, *(tensor(each) for each in told["packed"]))
        tensors = {name: tensor(place) for name, place in told["tensors"].items()}
        return MicroBatch(packed=packed, hold=told["hold"], kl=told["kl"], **tensors)

    return [micro(told) for told in places]


_TENSORS = [field.name for field in fields(MicroBatch) if field.name not in ("packed", "hold", "kl")]
