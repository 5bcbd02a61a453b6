"""What training changed, as a thing of its own: exact, to be taken forward or back.

A step taken twice would be wrong: so `HeldVersion` knows which version its tensors are, every walk begins and ends with
the digests of the tensors that it touches, and leaves everything as it was where they do not fit.
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
from tandem.online.delta_codec import UNKNOWN, DeltaPiece, coded, lots, move, side_by_side
from tandem.ops import digest
from tandem.ops.finite_check import Finite
from tandem.ops.module_tensors import Copies, check_alike

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

FORMAT = 2
"""Of an update's head and planes. 1: planes were deflated."""

_OTHERS = "the weights are of another model or precision than those before, or others are trained (train.parts)"


@dataclass(slots=True)
class HeldVersion:
    """Tensors in memory that are, bit by bit, a version that is known. All on one device.

    Beside weights that are trained on a GPU it is `at_rest`, on the host, and comes to them for as long as it is worked
    with: there are no gradients then, so that a job needs no room for it.
    """

    version: int
    tensors: Mapping[str, Tensor]
    numbers: dict[str, int]
    """Their digests."""

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor]) -> HeldVersion:
        """Wrap these tensors: from now on only `walk` writes to them, or the caller sets the version again."""
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        return cls(version, detached, _numbers(detached))

    @classmethod
    def copy_of(
        cls, version: int, tensors: Mapping[str, Tensor], device: str | torch.device | None = None
    ) -> HeldVersion:
        """None: each where it is."""
        copies = {name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in tensors.items()}
        return cls.of(version, copies)

    @property
    def digest(self) -> str:
        return digest_of_all(self.numbers)

    def at_rest(self) -> HeldVersion:
        """A copy on the host: of a GPU's tensors in pinned memory."""
        return HeldVersion(self.version, Copies().of(self.tensors), dict(self.numbers))

    @contextmanager
    def beside(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """On the device of `live` meanwhile. At rest is then what it has become; or, where that fails, what it was."""
        home, version, numbers = self.tensors, self.version, self.numbers
        device = next(iter(live.values())).device
        if all(tensor.device == device for tensor in home.values()):
            yield
            return
        self.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in home.items()}
        self.numbers = dict(numbers)
        try:
            yield
            if self.version != version:
                for name, tensor in self.tensors.items():
                    home[name].copy_(tensor, non_blocking=True)
                _finished(self.tensors)
        except BaseException:
            self.version, self.numbers = version, numbers
            raise
        finally:
            self.tensors = home

    @contextmanager
    def within(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """`live`, which is this version, is what moves, and at rest is then the same. Where that fails, both are what
        they were."""
        home, version, numbers = self.tensors, self.version, self.numbers
        if _numbers(live) != numbers:  # whose digests are followed step by step, and would be as wrong as they were
            _log.warning("what is trained was not version %d, and is made that", version)
            self.restore(live)
        self.tensors, self.numbers = {name: tensor.detach() for name, tensor in live.items()}, dict(numbers)
        try:
            yield
            for name, tensor in self.tensors.items():
                home[name].copy_(tensor, non_blocking=True)
            _finished(self.tensors)
        except BaseException:
            self.tensors, self.version, self.numbers = home, version, numbers
            self.restore(live)
            raise
        finally:
            self.tensors = home

    @torch.no_grad()
    def restore(self, live: Mapping[str, Tensor]) -> None:
        """`live` becomes this version, whatever was trained there."""
        check_alike(self.tensors, live, f"version {self.version}: {_OTHERS}")
        for name, tensor in live.items():
            tensor.detach().copy_(self.tensors[name])


def _finished(tensors: Mapping[str, Tensor]) -> None:
    """Whatever was asked of their device."""
    if (device := next(iter(tensors.values())).device).type == "cuda":
        torch.cuda.synchronize(device)


def digest_of_all(numbers: Mapping[str, int]) -> str:
    """One number for all of them, as the proof of a sync names it."""
    text = "\n".join(f"{name} {digest.text(number)}" for name, number in sorted(numbers.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return dict(zip(tensors, digest.pieces((name, tensor, 0, 0) for name, tensor in tensors.items()), strict=True))


@dataclass(frozen=True, slots=True)
class WeightChange:
    """How far weights went from others."""

    norm: float
    relative: float
    """To the norm of all weights before."""
    changed: int
    total: int
    not_finite: Sequence[str] = ()


@torch.no_grad()
def size_of_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, beside: float = 0.0) -> WeightChange:
    """Looks at every element. `beside`: the norm of the model's other weights, which do not change."""
    check_alike(before, after, _OTHERS)
    finite, sums_3 = Finite(), torch.zeros(3, dtype=torch.float64)
    for name, tensor in after.items():
        finite.add(name, tensor)
        for _, then_N, now_N in side_by_side(before[name], tensor):
            from_N, to_N = (each.view(tensor.dtype).to(torch.float64) for each in (then_N, now_N))
            sums = [(to_N - from_N).square().sum(), from_N.square().sum(), (then_N != now_N).sum()]
            sums_3 += torch.stack([each.double() for each in sums]).cpu()
    way, base, changed = sums_3.tolist()
    base += beside**2
    total = sum(tensor.numel() for tensor in after.values())
    return WeightChange(way**0.5, (way / base) ** 0.5 if base else 0.0, int(changed), total, finite.odd())


@dataclass(frozen=True, slots=True)
class Update:
    version: int
    parent: int
    touched: Mapping[str, tuple[int, int]]
    """Tensors of which something changed: their digests before and after."""
    pieces: Sequence[DeltaPiece]
    changed: int
    total: int
    """Elements of the model."""
    digest: str
    """Of all tensors, after."""
    notes: Mapping[str, Any]

    def head(self) -> dict[str, Any]:
        """All but the planes, as JSON; digests have 64 bits, which JSON's numbers do not."""
        return {
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("version", "parent", "changed", "total", "digest", "notes")},
            "touched": {name: [digest.text(number) for number in pair] for name, pair in self.touched.items()},
            "pieces": [[piece.coded, piece.parts, piece.sizes] for piece in self.pieces],
        }

    @classmethod
    def from_head(cls, head: Mapping[str, Any], raw: Sequence[Tensor]) -> Update:
        """CheckpointError: it is of another format."""
        told = dict(head)
        if (written := told.pop("format", 1)) != FORMAT:
            raise CheckpointError(
                f"update {told.get('version')} is of format {written}, and this Tandem reads {FORMAT}: go on with the "
                "release that wrote it, or begin in another directory"
            )
        touched = {name: (int(before, 16), int(after, 16)) for name, (before, after) in told["touched"].items()}
        pieces = [
            DeltaPiece(how, [(name, start, count) for name, start, count in parts], sizes, planes)
            for (how, parts, sizes), planes in zip(told["pieces"], raw, strict=True)
        ]
        return cls(**{**told, "touched": touched, "pieces": pieces})


@torch.no_grad()
def make(version: int, held: HeldVersion, live: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Update:
    """What leads from `held` to `live`; and `held` is then the new version: by the update itself, which proves it. A
    `held` that was written to is refused."""
    check_alike(held.tensors, live, f"update {version}: {_OTHERS}")
    numbers, changed = _numbers(live), list[int]()
    pieces = [coded(lot) for lot in lots(held.tensors, live, changed)]  # one that is at rest comes part by part
    touched = {name: (held.numbers[name], number) for name, number in numbers.items() if number != held.numbers[name]}
    with held.beside(live):
        _check(held, held.numbers, held.version, again={name for piece in pieces for name, *_ in piece.parts})
        total = sum(tensor.numel() for tensor in live.values())
        update = Update(version, held.version, touched, pieces, sum(changed), total, digest_of_all(numbers), notes)
        walk(held, [lambda: update])
    return update


@torch.no_grad()
def walk(held: HeldVersion, updates: Iterable[Callable[[], Update]], threads: int = 1) -> None:
    """One after the other: forward where `held` is an update's parent, back where it is its version. Threads read them
    and take them to the device, while what comes before them is walked."""
    start, numbers = held.version, dict(held.numbers)
    wanted = dict(numbers)
    done: list[tuple[DeltaPiece, bool]] = []
    device = next(iter(held.tensors.values())).device

    def taken(item: tuple[Update, DeltaPiece | None]) -> tuple[Update, DeltaPiece | None, Planes]:
        update, piece = item
        return update, piece, piece.planes_on(device) if piece else {}

    try:
        for update, piece, ready in ahead(taken, _taken_apart(ahead(_read, updates, threads)), threads):
            if piece is None:  # its first; what follows it is its pieces
                forward = held.version == update.parent
                wanted |= _ends(update, held, wanted)
                held.version = update.version if forward else update.parent
                continue
            forward = held.version == update.version
            move(piece, ready, held.tensors, held.numbers, forward=forward)
            done.append((piece, forward))
        _check(held, wanted, start)
    except BaseException:
        for piece, forward in reversed(done):
            move(piece, piece.planes_on(device), held.tensors, held.numbers, forward=not forward)
        held.version, held.numbers = start, numbers
        raise


def _read(source: Callable[[], Update]) -> Update:
    return source()


def _taken_apart(updates: Iterable[Update]) -> Iterator[tuple[Update, DeltaPiece | None]]:
    for update in updates:
        yield update, None
        yield from ((update, piece) for piece in update.pieces)


def _ends(update: Update, held: HeldVersion, now: Mapping[str, int]) -> dict[str, int]:
    """The digests after the step; CheckpointError if it does not begin here."""
    if held.version not in (update.parent, update.version):
        raise CheckpointError(
            f"update {update.version} leads from version {update.parent} to {update.version}, and these weights are of "
            f"version {held.version}"
        )
    forward = held.version == update.parent
    for name, (before, after) in update.touched.items():
        begins = before if forward else after
        if now.get(name) != begins:
            found = digest.text(now[name]) if name in now else "not there at all"
            raise CheckpointError(
                f"update {update.version}: digest of '{name}' in version {held.version}: {digest.text(begins)}, and "
                f"here: {found}; these weights are of another model, or were written to: load them again"
            )
    return {name: after if forward else before for name, (before, after) in update.touched.items()}


def _check(held: HeldVersion, wanted: Mapping[str, int], start: int, again: Collection[str] = ()) -> None:
    stale = [name for name, number in held.numbers.items() if number == UNKNOWN or name in again]
    found = held.numbers | _numbers({name: held.tensors[name] for name in stale})
    if odd := sorted(name for name, number in wanted.items() if found[name] != number):
        raise CheckpointDamaged(
            f"weights of version {start}, taken to version {held.version}: '{odd[0]}' has digest "
            f"{digest.text(found[odd[0]])} instead of {digest.text(wanted[odd[0]])} (of {len(odd)} tensors); they stay "
            f"at version {start}, but were written to: load them again"
        )
    held.numbers = found


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """In order, by so many threads, and no further ahead of who takes the results than keeps them busy."""
    with ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[R]] = deque()
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
