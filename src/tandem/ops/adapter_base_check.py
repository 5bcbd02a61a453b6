"""Check that engine and trainer have the same base model, which is never sent with adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops.digest import fingerprinted


def check_base(ours: Iterable[tuple[str, Tensor]], replies: Sequence[Mapping[str, Any]]) -> None:
    """Raise SyncError if an engine's base differs. `replies`: of attached engines; for adapters they have `base`, the
    digests of the engine's own base."""
    asked = [reply for reply in replies if reply.get("base") is not None]
    if not asked:
        return
    names = set[str]()

    def as_they_serve() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in ours:
            names.add(name)
            for dtype in {reply["layout"][name][0] for reply in asked if name in reply.get("layout", {})}:
                yield name, tensor.detach().to(getattr(torch, dtype))

    found = {(name, _name_of(tensor)): fingerprint for name, tensor, fingerprint in fingerprinted(as_they_serve())}
    for reply in asked:
        _check_one(names, found, reply["base"], reply.get("layout", {}))


def _check_one(
    names: set[str],
    found: Mapping[tuple[str, str], str],
    theirs: Mapping[str, str],
    layout: Mapping[str, Sequence[Any]],
) -> None:
    def differs(name: str) -> bool:
        served = name in names and name in theirs and name in layout
        return not served or found[name, layout[name][0]] != theirs[name]

    every = names | theirs.keys()
    if odd := sorted(name for name in every if differs(name)):
        raise SyncError(
            f"sync: the engine's base model is not the trainer's: '{odd[0]}' differs ({len(odd)} of "
            f"{len(every)} tensors); load the same model, in the same precision"
        )


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
