"""Which way a version's bytes go at one meeting: asked for, taken, and why not another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from tandem.errors import SyncError
from tandem.ops.device_names import device_name

Backend = Literal["auto", "gloo", "nccl", "ipc"]


class Way(NamedTuple):
    requested: Backend
    engaged: Literal["gloo", "nccl", "ipc", "memory"]
    """ipc: memory of the GPU that both are on. memory: of the host."""
    why: str = ""
    """Where auto took none of the faster ones."""

    @property
    def is_lent(self) -> bool:
        return self.engaged in ("ipc", "memory")


def way(mode: str, requested: Backend, device: torch.device, theirs: Sequence[str], *, roomy: bool) -> Way:
    """`theirs`: the device of each engine worker. `roomy`: the GPU has room for a second copy of what travels."""
    ours = device_name(device)
    if device.type == "cpu":
        if requested == "nccl":
            raise SyncError(f"{mode}: sync.backend = 'nccl': the trainer is on a CPU; use 'gloo' or 'ipc'")
        return Way(requested, "memory" if requested == "ipc" else "gloo")
    match requested:
        case "gloo":
            return Way(requested, "gloo")
        case "ipc":
            if odd := [each for each in theirs if each != ours]:
                raise SyncError(
                    f"{mode}: sync.backend = 'ipc': the trainer is on GPU {ours} and an engine on {odd[0] or 'none'}; "
                    "use 'nccl' or 'gloo'"
                )
            return Way(requested, "ipc")
        case "nccl":
            if why := _why_no_nccl(ours, theirs):
                raise SyncError(f"{mode}: sync.backend = 'nccl': {why}; use 'auto' or 'gloo'")
            return Way(requested, "nccl")
        case "auto":
            if roomy and set(theirs) == {ours}:
                return Way(requested, "ipc")
            why = _why_no_nccl(ours, theirs)
            return Way(requested, "gloo" if why else "nccl", why)


def _why_no_nccl(ours: str, theirs: Sequence[str]) -> str:
    if odd := [each for each in theirs if each in ("", "cpu")]:
        return f"an engine is on {odd[0] or 'a device that it does not name'}, and NCCL joins GPUs"
    if len({ours, *theirs}) < 1 + len(theirs):
        return "NCCL cannot have two of its ranks on one GPU"
    return ""
