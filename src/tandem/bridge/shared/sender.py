"""The trainer's end of `shared`: the policy's tensors are views of the engine's memory, so a step is the transfer.

The engine must not decode meanwhile: it sleeps from before the step until the version is loaded. Where several ranks
train, rank g has the memory of tensor-parallel worker g, on the same GPU, and announces versions to it alone
(train/crew_memory.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.shared.cuda_ipc import Mapped
from tandem.bridge.shared.memory import Segment, with_digests
from tandem.errors import SyncError
from tandem.ops.device_names import device_name
from tandem.ops.digest import RepeatedDigest, side_by_side
from tandem.ops.parts import rows_and_cols
from tandem.ops.phase_timer import Phases
from tandem.types import Part, Sent, WeightKind, Weights


def check_worker(handle: Mapping[str, Any], device: torch.device, parts: Iterable[Part]) -> None:
    """SyncError, with the name, unless the worker with this handle is on this device, and holds these parts."""
    worker, lent = handle["worker"], handle.get("cuda")
    if lent is not None and lent["device"] != device_name(device):
        raise SyncError(
            f"shared: worker {worker} is on GPU {lent['device']}, and the rank that is to train in its memory on "
            f"{device_name(device)}; give the engine the trainer's GPUs, in their order"
        )
    boxes: dict[str, list[int]] = {name: [*box] for name, *box in handle["boxes"]}
    for part in parts:
        rows, cols = rows_and_cols(part.tensor.shape)
        mine = [part.row_start, part.row_start + rows, part.col_start, part.col_start + cols]
        if part.name not in handle["derived"] and boxes.get(part.name) != mine:
            raise SyncError(
                f"shared: of '{part.name}' rank {worker} trains rows and columns {mine}, and worker {worker} serves "
                f"{boxes.get(part.name, 'nothing')}"
            )


class WorkerMemory:
    """The memory of one worker of an engine, as the rank that trains in it sees it."""

    def __init__(self, handle: Mapping[str, Any]) -> None:
        """`handle`: of the worker."""
        self._header = Segment.open(handle)
        self._memory = Mapped(handle["cuda"]) if "cuda" in handle else self._header
        self._derived = frozenset(handle["derived"])
        self._digest = bool(handle["digest"])
        self._digests: tuple[dict[str, str], RepeatedDigest] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._memory.tensors

    def announce(self, weights: Weights) -> Sent:
        """Say that the worker may serve this version, which is in its memory. SyncError if it is elsewhere."""
        phases = Phases()
        tensors = {part.name: part.tensor for part in weights.parts() if part.name not in self._derived}
        places = {name: self._memory.place(tensor) for name, tensor in tensors.items()}
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
        self._header.announce(weights.version)
        return Sent(weights.version, "shared", proof, seconds=phases.seconds, how="identity")

    def _read_back(self, places: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        if self._digests is None or self._digests[0] != places:
            self._digests = places, RepeatedDigest((name, tensors[name], 0, 0) for name in places)
        return with_digests(places, self._digests[1].take())


class SharedBridge:
    mode = "shared"
    carries: WeightKind = "live"

    def __init__(self, deadline_s: float = 60.0, *, digest: bool = False, ranks: int = 1) -> None:
        """`digest`: both ends also read all of that memory back, each through its own mapping. `ranks`: of the trainer;
        the engine has as many workers."""
        self._deadline_s, self._digest, self._ranks = deadline_s, digest, ranks
        self._source: SharedSource | None = None

    def source(self, num_receivers: int = 1) -> SharedSource:
        if num_receivers != self._ranks:
            raise SyncError(
                f"shared: each rank of the trainer trains in the memory of one engine process, and there are "
                f"{self._ranks} and {num_receivers} of them"
            )
        self._source = SharedSource(self._deadline_s, digest=self._digest)
        return self._source

    @property
    def handles(self) -> Sequence[Mapping[str, Any]]:
        """The handle of each worker's memory, in the order of ranks."""
        return self._attached().handles

    def storage(self) -> Mapping[str, Tensor] | None:
        return self._memory().tensors

    def send(self, weights: Weights) -> Sent:
        return self._memory().announce(weights)

    def joined(self, sent: Sent, proofs: Sequence[Mapping[str, str]]) -> Sent:
        """Return what all ranks sent. `proofs`: of each rank."""
        return replace(sent, fingerprints=side_by_side(proofs))

    def close(self) -> None:
        self._source = None

    def _attached(self) -> SharedSource:
        if self._source is None or not self._source.handles:
            raise SyncError("shared: no engine is attached, so there is no memory to train in")
        return self._source

    def _memory(self) -> WorkerMemory:
        memory = self._attached().memory
        assert memory is not None
        return memory


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
        self.handles: list[dict[str, Any]] = []
        self.memory: WorkerMemory | None = None
        """Of the first worker, which is rank 0's."""

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        raise SyncError("shared: an engine in this process needs no second mapping; use sync.bridge = 'inproc'")

    def attached(self, reply: Mapping[str, Any]) -> None:
        """Map the memory. The reply of several workers has a list of handles, and of boxes."""
        told: Any = reply.get("handles") or {}
        handles: list[Mapping[str, Any]] = told if isinstance(told, list) else [told]
        if any(handle.get("meeting") != self.link["meeting"] for handle in handles):
            raise SyncError("shared: the engine's handles are of another connection")
        boxes: Any = reply.get("boxes") or [()] * len(handles)
        of_all = {"derived": list(reply.get("derived", ())), "digest": self.link["digest"]}
        self.handles = [
            {**handle, **of_all, "worker": number, "boxes": boxes[number]} for number, handle in enumerate(handles)
        ]
        self.memory = WorkerMemory(self.handles[0])

    def receive(self, version: int, rank: int = 0) -> Weights:
        raise SyncError("shared: versions are received in the engine's process")

    def close(self) -> None:
        self.handles, self.memory = [], None
