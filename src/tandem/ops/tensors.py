"""What a module consists of, by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor


def live_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once. Buffers too: a rotary table that differs is another model."""
    return chain(module.named_parameters(), module.named_buffers())
