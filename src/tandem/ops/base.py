"""Adapters stand on a base model that is never sent: the engine's must be the trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops.digest import piece


def check_base(ours: Iterable[tuple[str, Tensor]], reply: Mapping[str, Any]) -> None:
    """`reply`: what an engine said of itself. It holds `base`, the digests of its own, where adapters are to come."""
    theirs, layout = reply.get("base"), reply.get("layout", {})
    if theirs is None:
        return
    found: dict[str, str] = {}
    for name, tensor in ours:
        dtype, _ = layout.get(name, (None, ()))  # one that the engine lacks makes another model, too
        found[name] = f"{piece(tensor.detach().to(getattr(torch, dtype)), name):016x}" if dtype else ""
    names = found.keys() | theirs.keys()
    if odd := sorted(name for name in names if found.get(name) != theirs.get(name)):
        raise SyncError(
            f"sync: the engine's base model is another than the trainer's: '{odd[0]}' differs ({len(odd)} of "
            f"{len(names)} tensors); load the same model, in the same precision"
        )
