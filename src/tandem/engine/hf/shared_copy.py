"""Make a second module that shares the first one's weights, without a copy, until either gets others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def twin(module: Any) -> Any:
    shared: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        shared[id(tensor)] = _of_same_memory(tensor)
    return copy.deepcopy(module, shared)


def _of_same_memory(tensor: Tensor) -> Tensor:
    data = tensor.data
    return torch.nn.Parameter(data, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else data
