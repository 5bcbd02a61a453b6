"""Replace the served weights of a module: stage a version, verify it, then flip by changing pointers.

Nothing that is served changes before `flip`. `flip` succeeds completely or changes nothing, and takes microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.lora_hooks import HookedAdapter
from tandem.errors import SyncError
from tandem.ops.digest import fingerprints
from tandem.ops.named_tensors import live_tensors, move_in, whereabouts
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, WeightKind, Weights


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version. Exactly this memory will be served, so its fingerprints are the proof."""

    kind: WeightKind
    tensors: Mapping[str, Tensor]
    fingerprints: Fingerprints


class StagedWeights:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._adapter = HookedAdapter(module)
        self._remembered: Fingerprints = {}

    def layout(self) -> dict[str, tuple[str, list[int]]]:
        return {name: (_name_of(tensor.dtype), list(tensor.shape)) for name, tensor in self._live().items()}

    def addresses(self) -> list[int]:
        """Return where the served weights are, an adapter's included."""
        return [each.data_ptr() for each in (*self._live().values(), *self._adapter.serving().values())]

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        move_in(self._live().items(), storage)

    def stage(self, weights: Weights, phases: Phases) -> StagedVersion:
        """Copy a version to the device and verify it; all errors are raised here, before anything changes."""
        arrived = dict(weights.tensors())
        if weights.kind == "live":
            self._check_identity(arrived)
            phases.end("verify")
            return StagedVersion("live", {}, dict(weights.expected))
        self._check_apart(arrived)
        if weights.kind == "full":
            self._check_fits(arrived)
        else:
            self._adapter.check(arrived, weights.adapter)
        device = next(self._module.parameters()).device
        # Later changes of the files must not affect served weights. What was read to a GPU is apart from them.
        apart = bool(weights.path) and device.type == "cpu"
        staged = {name: tensor.to(device, copy=apart) for name, tensor in arrived.items()}
        phases.end("stage")
        found = fingerprints(staged)
        if odd := [name for name in found if found[name] != weights.expected.get(name)]:
            raise SyncError(
                f"version {weights.version}: what arrived of '{odd[0]}' is not what was sent ({len(odd)} of "
                f"{len(found)} tensors); the previous version stays in service"
            )
        phases.end("verify")
        return StagedVersion(weights.kind, staged, found)

    def flip(self, staged: StagedVersion) -> Fingerprints:
        """Serve the staged version; return its fingerprints. Checks that forward passes read exactly the verified
        memory; otherwise the previous version is restored."""
        adapter, tensors = self._adapter.serving(), {name: tensor.data for name, tensor in self._live().items()}
        self._point_at(staged)
        serving = self._adapter.serving() if staged.kind == "adapter" else self._live()
        odd = [name for name in staged.tensors if whereabouts(staged.tensors[name]) != whereabouts(serving[name])]
        if odd:
            self._adapter.use(adapter)
            for name, tensor in self._live().items():
                tensor.data = tensors[name]
            raise SyncError(
                f"'{odd[0]}' would be served from other memory than was verified ({len(odd)} of {len(staged.tensors)} "
                "tensors); the previous version stays in service"
            )
        return staged.fingerprints

    def _point_at(self, staged: StagedVersion) -> None:
        # Full weights contain the merged adapter, so an adapter that stayed would be applied twice.
        self._adapter.use(staged.tensors if staged.kind == "adapter" else {})
        for name, tensor in self._live().items() if staged.kind == "full" else ():
            tensor.data = staged.tensors[name]

    def fingerprints(self) -> Fingerprints:
        """Compute fingerprints of the whole module now."""
        return fingerprints(self._live())

    def remember(self) -> None:
        """Record fingerprints before another process writes into this memory."""
        self._remembered = self.fingerprints()

    def intact(self) -> bool:
        """Return whether the memory is unchanged since `remember`."""
        return self.fingerprints() == self._remembered

    def _live(self) -> dict[str, Tensor]:
        return dict(live_tensors(self._module))

    def _check_identity(self, theirs: Mapping[str, Tensor]) -> None:
        """Raise SyncError unless every served tensor is the trainer's own memory, under the same name."""
        ours = self._live()
        if odd := sorted(ours.keys() ^ theirs.keys()):
            raise SyncError(f"single copy: {len(odd)} tensors are on one side only: {', '.join(odd[:3])}")
        for name, tensor in ours.items():
            if whereabouts(tensor) != whereabouts(theirs[name]):
                raise SyncError(f"single copy: '{name}' is not the trainer's memory; it would serve old weights")

    def _check_apart(self, arrived: Mapping[str, Tensor]) -> None:
        """Raise SyncError if a version arrived in memory that is served, which tears the served version."""
        served = {_storage(tensor) for tensor in (*self._live().values(), *self._adapter.serving().values())}
        if odd := [name for name, tensor in arrived.items() if tensor.numel() and _storage(tensor) in served]:
            raise SyncError(
                f"'{odd[0]}' arrived in the memory that is served ({len(odd)} of {len(arrived)} tensors): the "
                "served version was overwritten; every version needs its own memory"
            )

    def _check_fits(self, theirs: Mapping[str, Tensor]) -> None:
        ours = self._live()
        if odd := sorted(ours.keys() ^ theirs.keys()):
            raise SyncError(
                f"{len(odd)} of {len(ours.keys() | theirs.keys())} tensors are on one side only, as '{odd[0]}'; "
                "nothing is served unless all are mapped"
            )
        for name, tensor in ours.items():
            other = theirs[name]
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                was = f"{other.dtype} {list(other.shape)}"
                raise SyncError(f"'{name}' arrived as {was} and is served as {tensor.dtype} {list(tensor.shape)}")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
