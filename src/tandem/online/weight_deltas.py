"""Updates: the exact difference between the weights of two versions, which can be applied in both directions.

Applying an update twice would corrupt the weights. So `HeldVersion` knows which version its tensors are, and every
update checks the digests of the tensors that it changes, before and after; if they do not match, all is undone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.online.bit_planes import Planes
from tandem.online.delta_codec import UNKNOWN, DeltaBlock, apply_block, encode, find_changes, side_by_side
from tandem.ops import digest
from tandem.ops.named_tensors import Copies, Finite, check_alike

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

FORMAT = 2
"""Format of an update's files. Format 1 had deflated planes."""

_OTHERS = "the weights are of another model or precision than those before, or others are trained (train.parts)"


@dataclass(slots=True)
class HeldVersion:
    """A copy of a version's weights, exact to the bit; all tensors are on one device.

    If a GPU trains, this copy rests on the host, and moves to the GPU only while it is used. There are no gradients at
    that time, so a job needs no extra GPU memory for it.
    """

    version: int
    tensors: Mapping[str, Tensor]
    digests: dict[str, int]
    """By tensor."""

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor]) -> HeldVersion:
        """Wrap these tensors. From now on only `apply_updates` may write to them, or the caller sets the version
        again."""
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        return cls(version, detached, _digests(detached))

    @classmethod
    def copy_of(
        cls, version: int, tensors: Mapping[str, Tensor], device: str | torch.device | None = None
    ) -> HeldVersion:
        """Wrap copies of these tensors. `device` None: each stays on its own."""
        copies = {name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in tensors.items()}
        return cls.of(version, copies)

    @property
    def digest(self) -> str:
        return digest_of_all(self.digests)

    def at_rest(self) -> HeldVersion:
        """Return a copy on the host; of a GPU's tensors in pinned memory."""
        return HeldVersion(self.version, Copies().of(self.tensors), dict(self.digests))

    @contextmanager
    def on_device_of(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """Within this block the tensors are on the device of `live`. Afterwards the host copy follows their version; if
        the block fails, it stays as it was."""
        home, version, digests = self.tensors, self.version, self.digests
        device = next(iter(live.values())).device
        if all(tensor.device == device for tensor in home.values()):
            yield
            return
        self.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in home.items()}
        self.digests = dict(digests)
        try:
            yield
            if self.version != version:
                for name, tensor in self.tensors.items():
                    home[name].copy_(tensor, non_blocking=True)
                _synchronize(self.tensors)
        except BaseException:
            self.version, self.digests = version, digests
            raise
        finally:
            self.tensors = home

    @contextmanager
    def using(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """Within this block updates change `live`, which must be this version, in place. Afterwards the host copy is
        made equal to it; if the block fails, both are restored."""
        home, version, digests = self.tensors, self.version, self.digests
        if _digests(live) != digests:  # digests are computed from changes only, and would not find a wrong start
            _log.warning("the trained weights were not version %d: they are set to it", version)
            self.restore(live)
        self.tensors, self.digests = {name: tensor.detach() for name, tensor in live.items()}, dict(digests)
        try:
            yield
            for name, tensor in self.tensors.items():
                home[name].copy_(tensor, non_blocking=True)
            _synchronize(self.tensors)
        except BaseException:
            self.tensors, self.version, self.digests = home, version, digests
            self.restore(live)
            raise
        finally:
            self.tensors = home

    @torch.no_grad()
    def restore(self, live: Mapping[str, Tensor]) -> None:
        """Copy this version into `live`."""
        check_alike(self.tensors, live, f"version {self.version}: {_OTHERS}")
        for name, tensor in live.items():
            tensor.detach().copy_(self.tensors[name])


def _synchronize(tensors: Mapping[str, Tensor]) -> None:
    """Wait for the copies that were queued on their device."""
    if (device := next(iter(tensors.values())).device).type == "cuda":
        torch.cuda.synchronize(device)


def digest_of_all(digests: Mapping[str, int]) -> str:
    """Return one digest of all tensors, in the form of a sync proof."""
    text = "\n".join(f"{name} {digest.text(number)}" for name, number in sorted(digests.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return dict(zip(tensors, digest.pieces((name, tensor, 0, 0) for name, tensor in tensors.items()), strict=True))


@dataclass(frozen=True, slots=True)
class WeightChange:
    """How far weights moved."""

    norm: float
    relative: float
    """`norm` divided by the norm of all weights before."""
    changed: int
    total: int
    not_finite: Sequence[str] = ()


@torch.no_grad()
def size_of_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, beside: float = 0.0) -> WeightChange:
    """Compare every element. `beside`: the norm of the model's other weights, which do not change."""
    check_alike(before, after, _OTHERS)
    finite, sums_3 = Finite(), torch.zeros(3, dtype=torch.float64)
    for name, tensor in after.items():
        finite.add(name, tensor)
        for _, then_N, now_N in side_by_side(before[name], tensor):
            from_N, to_N = (each.view(tensor.dtype).to(torch.float64) for each in (then_N, now_N))
            sums = [(to_N - from_N).square().sum(), from_N.square().sum(), (then_N != now_N).sum()]
            sums_3 += torch.stack([each.double() for each in sums]).cpu()
    distance, base, changed = sums_3.tolist()
    base += beside**2
    total = sum(tensor.numel() for tensor in after.values())
    return WeightChange(distance**0.5, (distance / base) ** 0.5 if base else 0.0, int(changed), total, finite.odd())


@dataclass(frozen=True, slots=True)
class Update:
    version: int
    parent: int
    touched: Mapping[str, tuple[int, int]]
    """Changed tensors: their digests before and after."""
    blocks: Sequence[DeltaBlock]
    changed: int
    total: int
    """Elements of the model."""
    digest: str
    """Of all tensors, after the update."""
    notes: Mapping[str, Any]

    def head(self) -> dict[str, Any]:
        """Return all but the planes, as JSON. Digests are text: they have 64 bits, more than JSON's digests hold."""
        return {
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("version", "parent", "changed", "total", "digest", "notes")},
            "touched": {name: [digest.text(number) for number in pair] for name, pair in self.touched.items()},
            "pieces": [[block.coded, block.parts, block.sizes] for block in self.blocks],
        }

    @classmethod
    def from_head(cls, head: Mapping[str, Any], raw: Sequence[Tensor]) -> Update:
        """Make an update of what was read. CheckpointError: another format."""
        fields = dict(head)
        if (found := fields.pop("format", 1)) != FORMAT:
            raise CheckpointError(
                f"update {fields.get('version')} is of format {found}, and this Tandem reads {FORMAT}: use the release "
                "that wrote it, or start in another directory"
            )
        touched = {name: (int(before, 16), int(after, 16)) for name, (before, after) in fields["touched"].items()}
        blocks = [
            DeltaBlock(coded, [(name, start, count) for name, start, count in parts], sizes, planes)
            for (coded, parts, sizes), planes in zip(fields.pop("pieces"), raw, strict=True)
        ]
        return cls(**{**fields, "touched": touched, "blocks": blocks})


@torch.no_grad()
def make_update(version: int, held: HeldVersion, live: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Update:
    """Return the update from `held` to `live`, and apply it to `held`, which proves that it is right. CheckpointDamaged
    if `held` was written to before."""
    check_alike(held.tensors, live, f"update {version}: {_OTHERS}")
    digests, changed = _digests(live), list[int]()
    blocks = [encode(each) for each in find_changes(held.tensors, live, changed)]  # copies a host's `held` in parts
    touched = {name: (held.digests[name], number) for name, number in digests.items() if number != held.digests[name]}
    with held.on_device_of(live):
        _check(held, held.digests, held.version, again={name for block in blocks for name, *_ in block.parts})
        total = sum(tensor.numel() for tensor in live.values())
        update = Update(version, held.version, touched, blocks, sum(changed), total, digest_of_all(digests), notes)
        apply_updates(held, [lambda: update])
    return update


@torch.no_grad()
def apply_updates(held: HeldVersion, updates: Iterable[Callable[[], Update]], threads: int = 1) -> None:
    """Apply updates one after the other: forward if `held` is the update's parent, backward if it is its version.
    Threads read the next updates and copy them to the device meanwhile. After an error `held` is as before."""
    start, digests = held.version, dict(held.digests)
    wanted = dict(digests)
    done: list[tuple[DeltaBlock, bool]] = []
    device = next(iter(held.tensors.values())).device

    def to_device(item: tuple[Update, DeltaBlock | None]) -> tuple[Update, DeltaBlock | None, Planes]:
        update, block = item
        return update, block, block.planes_on(device) if block else {}

    try:
        for update, block, planes in prefetched(to_device, _with_blocks(prefetched(_read, updates, threads)), threads):
            if block is None:  # the update's first item; its blocks follow
                forward = held.version == update.parent
                wanted |= _digests_after(update, held, wanted)
                held.version = update.version if forward else update.parent
                continue
            forward = held.version == update.version
            apply_block(block, planes, held.tensors, held.digests, forward=forward)
            done.append((block, forward))
        _check(held, wanted, start)
    except BaseException:
        for block, forward in reversed(done):
            apply_block(block, block.planes_on(device), held.tensors, held.digests, forward=not forward)
        held.version, held.digests = start, digests
        raise


def _read(source: Callable[[], Update]) -> Update:
    return source()


def _with_blocks(updates: Iterable[Update]) -> Iterator[tuple[Update, DeltaBlock | None]]:
    """Yield each update, first with None and then with each of its blocks."""
    for update in updates:
        yield update, None
        yield from ((update, block) for block in update.blocks)


def _digests_after(update: Update, held: HeldVersion, now: Mapping[str, int]) -> dict[str, int]:
    """Return the digests that the update must lead to. CheckpointError if it does not start at `held`."""
    if held.version not in (update.parent, update.version):
        raise CheckpointError(
            f"update {update.version} leads from version {update.parent} to {update.version}, but these weights are of "
            f"version {held.version}"
        )
    forward = held.version == update.parent
    for name, (before, after) in update.touched.items():
        expected = before if forward else after
        if now.get(name) != expected:
            found = digest.text(now[name]) if name in now else "missing"
            raise CheckpointError(
                f"update {update.version}: '{name}' must have digest {digest.text(expected)} "
                f"in version {held.version}, not {found}: the weights are of another model or were overwritten; "
                "load them again"
            )
    return {name: after if forward else before for name, (before, after) in update.touched.items()}


def _check(held: HeldVersion, wanted: Mapping[str, int], start: int, again: Collection[str] = ()) -> None:
    stale = [name for name, number in held.digests.items() if number == UNKNOWN or name in again]
    found = held.digests | _digests({name: held.tensors[name] for name in stale})
    if odd := sorted(name for name, number in wanted.items() if found[name] != number):
        raise CheckpointDamaged(
            f"weights of version {start}, updated to version {held.version}: '{odd[0]}' has digest "
            f"{digest.text(found[odd[0]])} instead of {digest.text(wanted[odd[0]])} (and {len(odd) - 1} more tensors); "
            f"they stay at version {start}, but were written to: load them again"
        )
    held.digests = found


def prefetched(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `work` of each item, in order. Threads compute ahead of the caller, by as many results as there are
    threads."""
    with ThreadPoolExecutor(threads) as pool:
        in_flight: deque[Future[R]] = deque()
        for item in items:
            in_flight.append(pool.submit(work, item))
            if len(in_flight) > threads:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
