"""Convert the trainer's tensors to the form that engines serve: check all before anything moves, then pack them.

So a refusal costs the receivers nothing. A model goes tensor by tensor through two buckets, because there is no memory
for a second copy: one is packed while the other is sent. An adapter is small but has hundreds of tensors: it is packed
into one buffer, and the placement of its tensors is kept until they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import Placement, TensorEntry, dtype_named, listed, name_of
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_launches import Copying, copy_all, same
from tandem.ops.named_tensors import Finite
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Weights

_ADAPTED = ("base_model.model.", ".lora_")
Named = list[tuple[str, Tensor]]


# --- the form in which tensors are served


class Form(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def forms(weights: Weights, replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    """Return what will be served, by name. For a model the engines have reported it. For an adapter the trainer decides
    it; engines may report which layers there are and the type in which they keep adapters, `adapter_dtype`."""
    layout = _agreed(replies, mode)
    if weights.kind != "adapter":
        return layout
    dtype = next((reply["adapter_dtype"] for reply in replies if "adapter_dtype" in reply), None)
    found = {name: Form(dtype or name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.tensors()}
    if layout and (odd := sorted(name for name in found if _layer_of(name) not in layout)):
        raise SyncError(
            f"{mode}: version {weights.version}: {listed(odd)} adapt no layer that the engine serves ({len(odd)} of "
            f"{len(found)} tensors); trainer and engine must load one base model, and model.lora.targets may "
            "name only its linear layers, which stacked experts are not"
        )
    return found


def outgoing(weights: Weights, into: Mapping[str, Form], mode: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor once. Only when this ends without an error are all names there and all values finite."""
    finite = Finite()
    for name, tensor in shaped(weights, into, mode):
        finite.add(name, tensor)
        yield name, tensor
    check_numbers(finite.odd(), weights, into, mode)


def check_numbers(odd: Sequence[str], weights: Weights, into: Mapping[str, Form | TensorEntry], mode: str) -> None:
    if odd:
        kind = dtype_named(into[odd[0]].dtype)
        raise SyncError(
            f"{mode}: version {weights.version}: '{odd[0]}' holds a value that is not finite, or does not fit {kind}"
        )


def shaped(weights: Weights, into: Mapping[str, Form], mode: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors as `outgoing`, without a check of their values."""
    what = f"{mode}: version {weights.version}"
    missing, unknown = set(into), list[str]()
    with torch.no_grad():
        for name, tensor in weights.tensors():
            if name not in into:
                unknown.append(name)
            elif name not in missing:
                raise SyncError(f"{what}: the trainer named '{name}' twice")
            else:
                missing.discard(name)
                yield name, _served(name, tensor, into[name], what)
    if missing or unknown:
        raise SyncError(
            f"{what}: of {len(into)} tensors that the engine serves the trainer does not send {len(missing)} "
            f"({listed(sorted(missing))}), and it sends {len(unknown)} others ({listed(sorted(unknown))}); all must "
            "match, or none is sent: trainer and engine must load one model"
        )


def _agreed(replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    if not replies:
        raise SyncError(f"{mode}: no engine is attached, so it is unknown what is served")
    layouts = [
        {name: Form(dtype, tuple(shape)) for name, (dtype, shape) in reply["layout"].items()} for reply in replies
    ]
    for reply, layout in zip(replies[1:], layouts[1:], strict=True):
        names = sorted(layout.keys() | layouts[0].keys())
        if odd := [name for name in names if layout.get(name) != layouts[0].get(name)]:
            one, other = layouts[0].get(odd[0]), layout.get(odd[0])
            raise SyncError(
                f"{mode}: engines {replies[0]['boot_id']} and {reply['boot_id']} do not serve the same: {listed(odd)}; "
                f"the first is {one} there and {other} here"
            )
    return layouts[0]


def _served(name: str, tensor: Tensor, form: Form, what: str) -> Tensor:
    if tuple(tensor.shape) != form.shape:
        raise SyncError(f"{what}: '{name}' is {list(tensor.shape)} and is served as {list(form.shape)}")
    dtype = dtype_named(form.dtype)
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise SyncError(f"{what}: '{name}' is {tensor.dtype} and is served as {dtype}: its values would be others")
    return tensor.detach().to(dtype)


def _layer_of(name: str) -> str:
    prefix, mark = _ADAPTED
    return f"{name.removeprefix(prefix).partition(mark)[0]}.weight" if name.startswith(prefix) else ""


# --- one buffer for a whole version


class Flat:
    """A version in one buffer that stays. Where each tensor is, and how it is digested, is computed once: to go through
    hundreds of small tensors takes several times as long as their bytes take to travel."""

    def __init__(self, places: Placement, size_bytes: int, device: torch.device, *, alone: bool = False) -> None:
        """`size_bytes`: of the whole buffer, as the sender announced it. `alone`: as in ops/batched_launches.py, if an
        engine samples while a version arrives."""
        self.places = places
        self.raw = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.tensors = {name: entry.view(self.raw) for name, entry in places.tensors.items()}
        self._digests = digest.RepeatedDigest(
            ((name, tensor, 0, 0) for name, tensor in self.tensors.items()), checked=True, alone=alone
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def filling(self, tensors: Iterable[tuple[str, Tensor]]) -> Copying:
        """Return the copy of these tensors into the buffer; it casts them."""
        return Copying((self.tensors[name], tensor) for name, tensor in tensors)

    def fingerprints(self) -> Fingerprints:
        """Return the digests of the present content."""
        return self._named(self._digests.take())

    def checked_fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return the digests, and the names of tensors with values that are not finite."""
        numbers, odd = self._digests.look()
        return self._named(numbers), odd

    def _named(self, numbers: list[int]) -> Fingerprints:
        return dict(zip(self.tensors, digest.texts(numbers), strict=True))


class PackedAdapter:
    """An adapter in one buffer. A trainer has the same tensors for each version, so the copies and their targets are
    kept."""

    def __init__(self, named: Named, replies: Sequence[Mapping[str, Any]], places: Placement, head: bytes) -> None:
        self._named, self._replies = named, list(replies)
        device = named[0][1].device if named else torch.device("cpu")
        self.flat = Flat(places, max(places.size_bytes, len(head)), device, alone=True)
        if head:
            self.flat.raw[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.filling = self.flat.filling(named)

    def is_of(self, named: Named, replies: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these are the same tensors, for engines with the same replies."""
        ours, theirs = ([tensor for _, tensor in each] for each in (self._named, named))
        names = [name for name, _ in self._named] == [name for name, _ in named]
        return names and same(ours, theirs) and same(self._replies, replies)


class AdapterPacker:
    """Packs one adapter version after the other, into the same buffer while their form stays."""

    def __init__(self, mode: str, layout: Callable[[Mapping[str, Form]], tuple[Placement, bytes]]) -> None:
        """`layout`: returns where tensors of these forms go, and the bytes before the first of them."""
        self._mode, self._layout = mode, layout
        self._packed: PackedAdapter | None = None

    def pack(self, weights: Weights, replies: Sequence[Mapping[str, Any]], phases: Phases) -> tuple[Flat, Fingerprints]:
        """Pack a version. SyncError if it cannot be served, or has values that are not finite."""
        named = list(weights.tensors())
        packed = self._packed
        if packed is None or not packed.is_of(named, replies):
            into = _forms_of(weights, named, replies, self._mode)
            self._packed = packed = PackedAdapter(named, replies, *self._layout(into))
        packed.filling.run()
        phases.end("gather")
        fingerprints, odd = packed.flat.checked_fingerprints()
        phases.end("hash")
        check_numbers(odd, weights, packed.flat.places.tensors, self._mode)
        return packed.flat, fingerprints


def _forms_of(weights: Weights, named: Named, replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    """Return the form of each tensor. SyncError unless each can be served in it. `named`: what `weights` yielded; a
    second pass over `weights` may make new tensors."""
    again = replace(weights, tensors=lambda: iter(named))
    into = forms(again, replies, mode)
    for _ in shaped(again, into, mode):
        """Check each tensor."""
    return into


# --- what the trainer hands to a process group or to shared buffers


class Carrier(Protocol):
    """What moves buckets: a process group, or memory that both ends map."""

    def aside(self) -> AbstractContextManager[None]: ...
    def buffers(self, count: int, size: int) -> list[Tensor]: ...
    def within(self, raw: Tensor) -> Tensor: ...
    def broadcast(self, buffer: Tensor, deadline: Deadline, /) -> Any: ...
    def free(self, work: Any, what_failed: str, deadline: Deadline, /) -> None: ...
    def finish(self, what_failed: str, deadline: Deadline) -> None: ...


class PackedVersion(Protocol):
    @property
    def places(self) -> wire.Placement: ...
    @property
    def fingerprints(self) -> Fingerprints: ...
    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None: ...


class Packing:
    """Packs the versions of one connection."""

    def __init__(self, mode: str, replies: Sequence[Mapping[str, Any]]) -> None:
        """`replies`: of engines when they were attached; more may come."""
        self._mode, self._replies = mode, replies
        self._known: tuple[list[tuple[str, Form]], wire.Placement] | None = None
        self._adapter_packer = AdapterPacker(mode, lambda into: (self._placement(list(into.items())), b""))

    def pack(self, weights: Weights, phases: Phases) -> PackedVersion:
        if weights.kind == "adapter":
            return self._adapter(weights, phases)
        into = forms(weights, self._replies, self._mode)
        fingerprints, odd = digest.all_at_once(shaped(weights, into, self._mode), phases)
        check_numbers(odd, weights, into, self._mode)
        return _ModelTensors(
            weights, into, self._placement([(name, into[name]) for name in fingerprints]), fingerprints
        )

    def _adapter(self, weights: Weights, phases: Phases) -> PackedVersion:
        return AdapterTensors(*self._adapter_packer.pack(weights, self._replies, phases))

    def _placement(self, forms: list[tuple[str, Form]]) -> wire.Placement:
        """Return the placement of tensors in the order in which they travel."""
        if self._known is None or self._known[0] != forms:
            self._known = forms, wire.Placement.of(dict(forms))
        return self._known[1]


class AdapterTensors:
    def __init__(self, flat: Flat, fingerprints: Fingerprints) -> None:
        self.places, self.fingerprints = flat.places, fingerprints
        self._flat = flat

    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        if manifest.size_bytes:
            carrier.broadcast(carrier.within(self._flat.raw), deadline)
        carrier.finish(f"version {manifest.version} was not taken", deadline)


class _ModelTensors:
    def __init__(
        self, weights: Weights, into: Mapping[str, Form], places: wire.Placement, fingerprints: Fingerprints
    ) -> None:
        self.places, self.fingerprints = places, fingerprints
        self._weights, self._into = weights, into

    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        packer = Packer(carrier, manifest, deadline)
        for name, tensor in shaped(self._weights, self._into, manifest.mode):
            packer.add(wire.as_bytes(tensor), manifest.tensors[name].offset)
        packer.finish()


def num_buffers(manifest: wire.Manifest) -> int:
    """Return how many buffers a version needs: two, if one can be written while the other one travels."""
    return min(2, -(-manifest.size_bytes // manifest.bucket_bytes))


class Packer:
    """Packs tensors one behind the other into buckets, and sends each bucket when it is full."""

    def __init__(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        self._carrier: Any = carrier
        self._deadline = deadline
        self._bucket_bytes, self._left = manifest.bucket_bytes, manifest.size_bytes
        self._failed = f"version {manifest.version} was not taken"
        count = num_buffers(manifest)
        size = min(self._bucket_bytes, manifest.size_bytes)
        self._buffers = carrier.buffers(count, size)
        self._works: list[Any] = [None] * count
        self._turn = 0
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, raw: Tensor, position: int) -> None:
        while raw.numel():
            bucket, at = divmod(position, self._bucket_bytes)
            self._go_on_to(bucket)
            part = raw[: self._bucket_bytes - at]
            self._pairs.append(_wide(self._buffers[bucket % 2][at : at + part.numel()], part))
            raw, position = raw[part.numel() :], position + part.numel()

    def finish(self) -> None:
        if self._left:
            self._send()
        self._carrier.finish(self._failed, self._deadline)

    def _go_on_to(self, bucket: int) -> None:
        while self._turn < bucket:
            self._send()

    def _send(self) -> None:
        turn = self._turn % 2
        full = min(self._bucket_bytes, self._left)
        copy_all(self._pairs)
        self._pairs.clear()
        self._works[turn] = self._carrier.broadcast(self._buffers[turn][:full], self._deadline)
        self._left -= full
        self._turn += 1
        if self._left and (before := self._works[self._turn % 2]) is not None:
            self._carrier.free(before, self._failed, self._deadline)


def _wide(into: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as 8-byte integers where alignment allows: the same bytes, copied faster."""
    if (raw.numel() | raw.data_ptr() | into.data_ptr()) % 8:
        return into, raw
    return into.view(torch.int64), raw.view(torch.int64)
