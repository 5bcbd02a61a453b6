"""Choose what moves the buckets of one connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from tandem.errors import SyncError
from tandem.ops.device_names import device_name

Backend = Literal["auto", "gloo", "nccl", "ipc"]


class Transport(NamedTuple):
    """What moves the buckets of one connection."""

    requested: Backend
    engaged: Literal["gloo", "nccl", "ipc", "memory"]
    """ipc: shared memory of one GPU. memory: shared memory of one host."""
    why: str = ""
    """Why auto took none of the faster ones."""

    @property
    def is_shared(self) -> bool:
        return self.engaged in ("ipc", "memory")


def choose_transport(
    mode: str,
    requested: Backend,
    device: torch.device,
    theirs: Sequence[str],
    *,
    roomy: bool,
    other_ranks: Sequence[str] = (),
) -> Transport:
    """Choose what moves the buckets. `theirs`: the device of each engine worker. `roomy`: the GPU has memory for a
    second copy of what travels. `other_ranks`: the device of each other rank of the trainer."""
    ours = device_name(device)
    alone = "" if not other_ranks else f"shared buffers are for one rank, and the trainer has {1 + len(other_ranks)}"
    if requested == "ipc" and alone:
        raise SyncError(f"{mode}: sync.backend = 'ipc': {alone}; use 'nccl', 'gloo' or 'auto'")
    if device.type == "cpu":
        if requested == "nccl":
            raise SyncError(f"{mode}: sync.backend = 'nccl': the trainer is on a CPU; use 'gloo' or 'ipc'")
        return Transport(requested, "memory" if requested == "ipc" else "gloo")
    match requested:
        case "gloo":
            return Transport(requested, "gloo")
        case "ipc":
            if odd := [each for each in theirs if each != ours]:
                raise SyncError(
                    f"{mode}: sync.backend = 'ipc': the trainer is on GPU {ours} and an engine on {odd[0] or 'none'}; "
                    "use 'nccl' or 'gloo'"
                )
            return Transport(requested, "ipc")
        case "nccl":
            if why := _why_no_nccl([ours, *other_ranks], theirs):
                raise SyncError(f"{mode}: sync.backend = 'nccl': {why}; use 'auto' or 'gloo'")
            return Transport(requested, "nccl")
        case "auto":
            if roomy and set(theirs) == {ours} and not alone:
                return Transport(requested, "ipc")
            why = _why_no_nccl([ours, *other_ranks], theirs)
            return Transport(
                requested, "gloo" if why else "nccl", "; ".join(filter(None, (why, alone if roomy else "")))
            )


def _why_no_nccl(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if odd := [each for each in theirs if each in ("", "cpu")]:
        return f"an engine is on {odd[0] or 'a device that it does not name'}, and NCCL joins GPUs"
    if len({*ours, *theirs}) < len(ours) + len(theirs):
        return "NCCL cannot have two of its ranks on one GPU"
    return ""
