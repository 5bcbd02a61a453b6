"""Ranks on several hosts: each host holds every row of the weights once, and gradients are summed between hosts.

Rank r is on host r // row_shards and holds run r % row_shards of the rows, so ranks that are `row_shards` apart hold
the same. FSDP2 sees the ranks of this host alone. Between hosts, ranks that hold the same rows add the sums of their
hosts: each adds one piece, in the order of hosts, and gets the other pieces from the others. Where a host has a power
of two of ranks, that continues the tree of train/gradient_tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Hosts:
    """What this rank is on its host, and the groups of ranks that it talks to. All ranks build it together."""

    def __init__(self, rank: int, ranks: int, row_shards: int, device: torch.device, timeout: timedelta) -> None:
        """`row_shards`: ranks of a host. `timeout`: of a collective."""
        self.rank, self.row_shards = rank, row_shards
        self.count = ranks // row_shards
        self.number, self.row_shard = divmod(rank, row_shards)
        self._same_rows: Any = None
        if self.count == 1:
            self.mesh = init_device_mesh(device.type, (ranks,))
            self.groups: list[Any] = [self.mesh.get_group()]
            return
        numbers = torch.arange(ranks).view(self.count, row_shards)
        of_host, _ = dist.new_subgroups_by_enumeration(numbers.tolist(), timeout=timeout)
        self._same_rows, _ = dist.new_subgroups_by_enumeration(numbers.t().tolist(), timeout=timeout)
        self.groups = [self._same_rows, of_host]
        both = DeviceMesh.from_group(self.groups, device.type, mesh=numbers, mesh_dim_names=("hosts", "rows"))
        self.mesh = both["rows"]

    def apart(self, of_ranks: Sequence[bool]) -> list[list[bool]]:
        """Return what is said of each rank as a list for each host."""
        return [list(of_ranks[first : first + self.row_shards]) for first in range(0, len(of_ranks), self.row_shards)]

    def add_up(self, flat: Tensor, present: Sequence[bool], tree: Callable[[Sequence[Tensor]], Tensor]) -> None:
        """Replace a sum of this host by that of all hosts that are `present`. Called by all ranks."""
        if self.count == 1:
            return
        size = flat.numel()
        padded = torch.nn.functional.pad(flat, (0, -size % self.count))
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self._same_rows)
        pieces = received.view(self.count, -1)
        total = tree([piece for piece, there in zip(pieces, present, strict=True) if there])
        dist.all_gather_into_tensor(padded, total, group=self._same_rows)
        flat.copy_(padded[:size])
