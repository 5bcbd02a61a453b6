"""The trainer's end of `shared`: the policy's tensors are views of the engine's memory, so a step is the transfer.

The engine must not decode meanwhile: it sleeps from before the step until the version is loaded.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.shared.cuda_ipc import Mapped
from tandem.bridge.shared.memory import Segment, with_digests
from tandem.errors import SyncError
from tandem.ops.digest import RepeatedDigest
from tandem.ops.phase_timer import Phases
from tandem.types import Sent, WeightKind, Weights


class SharedBridge:
    mode = "shared"
    carries: WeightKind = "live"

    def __init__(self, deadline_s: float = 60.0, *, digest: bool = False) -> None:
        """`digest`: both ends also read all of that memory back, each through its own mapping."""
        self._deadline_s, self._digest = deadline_s, digest
        self._digests: tuple[dict[str, str], RepeatedDigest] | None = None
        self._source: SharedSource | None = None

    def source(self, num_receivers: int = 1) -> SharedSource:
        if num_receivers != 1:
            raise SyncError(f"shared: one copy of the weights serves one engine process, and there are {num_receivers}")
        self._source = SharedSource(self._deadline_s, digest=self._digest)
        return self._source

    def storage(self) -> Mapping[str, Tensor] | None:
        return self._rendezvous().memory.tensors

    def send(self, weights: Weights) -> Sent:
        shared, phases = self._rendezvous(), Phases()
        tensors = {name: tensor for name, tensor in weights.tensors() if name not in shared.derived}
        places = {name: shared.memory.place(tensor) for name, tensor in tensors.items()}
        if odd := [name for name, place in places.items() if not place]:
            raise SyncError(
                f"shared: {len(odd)} of the trainer's tensors are not in the engine's memory, as '{odd[0]}': what is "
                "trained there would never be served"
            )
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the optimizer's kernels must have run before the engine reads
        phases.end("gather")
        proof = self._read_back(places, tensors) if self._digest else places
        phases.end("hash")
        shared.header.announce(weights.version)
        return Sent(weights.version, self.mode, proof, seconds=phases.seconds, how="identity")

    def _read_back(self, places: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        if self._digests is None or self._digests[0] != places:
            self._digests = places, RepeatedDigest((name, tensors[name], 0, 0) for name in places)
        return with_digests(places, self._digests[1].take())

    def close(self) -> None:
        self._source = self._digests = None

    def _rendezvous(self) -> SharedRendezvous:
        if self._source is None or self._source.rendezvous is None:
            raise SyncError("shared: no engine is attached, so there is no memory to train in")
        return self._source.rendezvous


@dataclass(frozen=True)
class SharedRendezvous:
    header: Segment
    memory: Segment | Mapped
    derived: frozenset[str]
    """Tensors that the engine computes itself and has compared with the trainer's: rotary tables."""


class SharedSource:
    carries: WeightKind = "live"

    def __init__(self, deadline_s: float, *, digest: bool) -> None:
        # Every connection has a new name, so that handles of an earlier one are refused.
        meeting = uuid.uuid4().hex
        self.link: Mapping[str, Any] = {
            "mode": "shared",
            "meeting": meeting,
            "deadline_s": deadline_s,
            "digest": digest,
        }
        self.rendezvous: SharedRendezvous | None = None

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        raise SyncError("shared: an engine in this process needs no second mapping; use sync.bridge = 'inproc'")

    def attached(self, reply: Mapping[str, Any]) -> None:
        handle = reply.get("handles") or {}
        if handle.get("meeting") != self.link["meeting"]:
            raise SyncError("shared: the engine's handles are of another connection")
        header = Segment.open(handle)
        memory = Mapped(handle["cuda"]) if "cuda" in handle else header
        self.rendezvous = SharedRendezvous(header, memory, frozenset(reply.get("derived", ())))

    def receive(self, version: int, rank: int = 0) -> Weights:
        raise SyncError("shared: versions are received in the engine's process")

    def close(self) -> None:
        self.rendezvous = None
