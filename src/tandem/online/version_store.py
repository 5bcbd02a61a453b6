"""Versions on the disk: anchors, which hold everything, and updates, which hold what changed since the version before.

`anchor-000010/` and `update-000012-from-000010/` are sealed directories (io/sealed_directory.py), never changed and
never named twice. Their names alone tell the tree: training on after a rollback makes a branch. Which version is the
one that counts is not said here but where jobs are committed; a version that was written and never committed is
forgotten by name. One process writes; any may read.

A version is made from the nearest anchor behind it and the updates on the way. Updates go both ways, so an anchor
further on serves as well where that way is damaged; its optimizer does not, having seen what came later.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import sealed_directory
from tandem.online.weight_deltas import HeldVersion, Update, make, walk

_ANCHOR = re.compile(r"anchor-(\d{6,})")
_UPDATE = re.compile(r"update-(\d{6,})-from-(\d{6,})")
_NUMBER = re.compile(r"(?:anchor|update)-(\d{6,})")
_HEAD, _WEIGHTS, _STATE, _PLANES = "version.json", "weights.safetensors", "state.safetensors", "update.safetensors"


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    version: int
    size_bytes: int
    seconds: float
    digest: str
    changed: int
    total: int
    """Elements of the model."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the names of the directories say about a version."""

    version: int
    parent: int | None
    """None: there is no update to it."""
    anchored: bool


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    held: HeldVersion
    state: Mapping[str, Tensor] | None
    """Of the anchor that this was made from. None if that is a later one: its optimizer saw what came after."""
    state_version: int
    notes: Mapping[str, Any]
    """Of that anchor."""


class VersionStore:
    """`anchor_every`: updates from an anchor at most. `anchor_share`: their bytes at most, of the anchor's."""

    def __init__(self, directory: Path, *, anchor_every: int = 16, anchor_share: float = 0.5, threads: int = 1) -> None:
        self.directory = directory
        self.damaged: dict[str, str] = {}
        """Directories that were found to be, and why. They are gone around."""
        self.without_state: dict[str, str] = {}
        """Anchors whose optimizer was found to be, and why: their weights are as good as any."""
        self._every, self._share, self._threads = anchor_every, anchor_share, threads

    # --- what there is

    def known(self) -> dict[int, Known]:
        """By version; of what is damaged, nothing."""
        parents, anchors = self._names()
        return {version: Known(version, parents.get(version), version in anchors) for version in {*parents, *anchors}}

    def named(self) -> set[int]:
        """The versions that anything is there of, damaged or not."""
        parents, anchors = self._names(damaged=True)
        return {*parents, *anchors}

    def anchor_due(self, version: int) -> bool:
        parents, anchors = self._names()
        way = _up(version, parents)
        anchor = next((each for each in way if each in anchors), None)
        if anchor is None:
            return True
        updates = way[: way.index(anchor)]
        if len(updates) >= self._every:
            return True
        sizes = (_size(self._update(each, parents[each]) / _PLANES) for each in updates)
        return sum(sizes) > self._share * _size(self._anchor(anchor) / _WEIGHTS)

    # --- writing

    def anchor(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> StoredUpdate:
        """All of it, durably. CheckpointError if the weights are not what the update to this version says. On any
        thread, of tensors that are not written meanwhile."""
        started, held = time.perf_counter(), HeldVersion.of(version, weights)
        parents, _ = self._names()
        if version not in parents:
            self._refuse_old(version)
        elif (said := self._head(self._update(version, parents[version]))["digest"]) != held.digest:
            raise CheckpointError(
                f"anchor {version}: these weights have digest {held.digest}, version {version} {said}"
            )
        with sealed_directory.sealed(self._anchor(version)) as directory:
            save_file(_plain(weights), directory / _WEIGHTS)
            save_file(_plain(state or {}), directory / _STATE)
            _write_head(directory, {"version": version, "digest": held.digest, "notes": dict(notes or {})})
        total = sum(tensor.numel() for tensor in weights.values())
        return self._written(self._anchor(version), version, started, held.digest, total, total)

    def update(
        self, version: int, held: HeldVersion, live: Mapping[str, Tensor], notes: Mapping[str, Any] | None = None
    ) -> StoredUpdate:
        """What leads from `held` to `live`, durably; `held` is then `version`, and still its parent if this fails."""
        self._refuse_old(version)
        started, parent = time.perf_counter(), held.version
        if parent not in self.known():
            raise CheckpointError(f"{self.directory}: version {parent}, that {version} is to follow, was never written")
        made = make(version, held, live, dict(notes or {}))
        path = self._update(version, parent)
        try:
            with sealed_directory.sealed(path) as directory:
                save_file({str(index): piece.raw for index, piece in enumerate(made.pieces)}, directory / _PLANES)
                _write_head(directory, made.head())
        except BaseException:
            with held.beside(live):
                walk(held, [lambda: made])
            raise
        return self._written(path, version, started, made.digest, made.changed, made.total)

    def forget(self, keep: Collection[int]) -> None:
        """Whatever no version of `keep` needs: orphans, and what lies behind the anchors of the oldest. Of those that
        cannot be made any more, the rest stays, since it may be repaired."""
        parents, anchors = self._names()
        of_all, _ = self._names(damaged=True)
        if odd := sorted(set(keep) - self.named()):
            raise CheckpointError(f"{self.directory}: version {odd[0]} is to be kept, and is not there")
        ways = [_way_to_anchor(version, parents, anchors) or _up(version, of_all) for version in keep]
        wanted = {version for way in ways for version in way}
        used = {way[-1] for way in ways}
        for version, parent in parents.items():
            if not {version, parent} <= wanted:
                sealed_directory.remove(self._update(version, parent))
        for version in anchors - used:
            sealed_directory.remove(self._anchor(version))

    def sweep(self) -> None:
        """What a writer that was killed left half done. Only for the one that writes."""
        sealed_directory.sweep(self.directory)

    # --- reading

    def load(self, version: int, device: str | torch.device = "cpu") -> LoadedVersion:
        """CheckpointDamaged, with the reasons, if it cannot be made any more."""
        while True:
            parents, anchors = names = self._names()
            way = _way_to_anchor(version, parents, anchors)
            if way is None:
                raise CheckpointDamaged(
                    f"{self.directory}: no whole way leads from an anchor to version {version} ({self._reasons()})"
                )
            try:
                held, notes = self._read_anchor(way[-1], device)
                walk(held, self._updates(way[::-1], parents), self._threads)
            except CheckpointDamaged:
                if names == self._names():
                    raise  # no file is to blame
                continue  # another way
            if way[-1] in _up(version, parents):
                return LoadedVersion(held, self._state(way[-1]), way[-1], notes)
            return LoadedVersion(held, None, way[-1], {})

    def state_of(self, version: int) -> tuple[Mapping[str, Tensor], int] | None:
        """The optimizer's, and whose: of the nearest anchor behind this version whose state is whole. The weights are
        not looked at."""
        parents, anchors = self._names(damaged=True)
        for each in _up(version, parents):
            if each in anchors and (state := self._state(each)) is not None:
                return state, each
        return None

    def _state(self, version: int) -> Mapping[str, Tensor] | None:
        path = self._anchor(version)
        try:
            sealed_directory.verify(path, only=[_STATE])
        except CheckpointDamaged as error:
            self.without_state[path.name] = str(error)
            return None
        return load_file(path / _STATE)

    def whole(self, version: int, device: str | torch.device = "cpu") -> tuple[LoadedVersion, list[str]]:
        """The nearest version, from this one back to the first, that can be made; and what was found damaged. That gets
        other names: only for the one that writes."""
        parents, _ = self._names()
        reasons: list[str] = []
        for each in _up(version, parents):
            try:
                loaded = self.load(each, device)
            except CheckpointDamaged as error:
                reasons.append(f"version {each}: {error}")
                continue
            reasons += [f"{name} is damaged, now called {aside}" for name, aside in self._set_aside().items()]
            reasons += [f"{name} has no optimizer any more: {why}" for name, why in self.without_state.items()]
            return loaded, reasons
        raise CheckpointDamaged(
            f"{self.directory}: neither version {version} nor any before it is whole ({'; '.join(reasons)}); mend one "
            "of the files, or begin in another directory"
        )

    def move(self, held: HeldVersion, version: int) -> str:
        """Back, forward or to another branch, in place: at the cost of what changed between; empty. Where no whole way
        leads there, all of it is read from an anchor, and this says why. `held` stays as it was where that fails."""
        while True:
            parents, _ = self._names()
            way = _way(held.version, {version}, parents)
            if way is None:
                return self._move_all(held, version)
            try:
                walk(held, self._updates(way, parents), self._threads)
                return ""
            except CheckpointDamaged:
                if self._names()[0] == parents:
                    raise

    def _move_all(self, held: HeldVersion, version: int) -> str:
        left = held.version
        device = next(iter(held.tensors.values())).device
        loaded = self.load(version, device).held
        loaded.restore(held.tensors)
        held.version, held.numbers = version, loaded.numbers
        return f"no updates lead from version {left} to {version} ({self._reasons()}): it was read from its anchor"

    # --- names

    def _anchor(self, version: int) -> Path:
        return self.directory / f"anchor-{version:06d}"

    def _update(self, version: int, parent: int) -> Path:
        return self.directory / f"update-{version:06d}-from-{parent:06d}"

    def _names(self, *, damaged: bool = False) -> tuple[dict[int, int], set[int]]:
        """The parent of each version that has one; the versions that are anchored. `damaged`: of those too."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        sound = [name for name in names if damaged or name not in self.damaged]
        parents = {int(match[1]): int(match[2]) for name in sound if (match := _UPDATE.fullmatch(name))}
        return parents, {int(match[1]) for name in sound if (match := _ANCHOR.fullmatch(name))}

    def _refuse_old(self, version: int) -> None:
        """Damaged ones and half-written ones count too: their numbers may have been seen."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        newest = max((int(match[1]) for name in names if (match := _NUMBER.search(name))), default=-1)
        if version <= newest:
            raise CheckpointError(f"{self.directory}: version {newest} was there before; {version} is no new number")

    # --- files

    def _updates(self, way: Sequence[int], parents: Mapping[int, int]) -> list[Callable[[], Update]]:
        """What leads along it."""
        edges = ((there, here) if parents.get(there) == here else (here, there) for here, there in pairwise(way))
        return [partial(self._read_update, self._update(*edge)) for edge in edges]

    def _read_update(self, path: Path) -> Update:
        head, raw = self._head(path), load_file(path / _PLANES)
        return Update.from_head(head, [raw[str(index)] for index in range(len(raw))])

    def _read_anchor(self, version: int, device: str | torch.device) -> tuple[HeldVersion, dict[str, Any]]:
        path = self._anchor(version)
        head = self._head(path, only=[_HEAD, _WEIGHTS])
        held = HeldVersion.of(
            version, load_file(path / _WEIGHTS, device=str(device))
        )  # private pages: files stay as they are
        if held.digest != head["digest"]:
            raise CheckpointDamaged(f"{path}: its weights have digest {held.digest} instead of {head['digest']}")
        return held, head["notes"]

    def _head(self, path: Path, only: Collection[str] = ()) -> dict[str, Any]:
        """Of a directory of which every byte was looked at, or of these files."""
        try:
            sealed_directory.verify(path, only)
        except CheckpointDamaged as error:
            if path.is_dir():  # it may be all of them that cannot be reached, for a while
                self.damaged[path.name] = str(error)
            raise
        return json.loads((path / _HEAD).read_text(encoding="utf-8"))

    def _set_aside(self) -> dict[str, str]:
        there = [name for name in self.damaged if (self.directory / name).exists()]
        return {
            name: f"{sealed_directory.quarantine(self.directory / name).name} ({self.damaged[name]})" for name in there
        }

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.damaged.items()) or "they were removed"

    def _written(self, path: Path, version: int, started: float, digest: str, changed: int, total: int) -> StoredUpdate:
        size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return StoredUpdate(version, size_bytes, time.perf_counter() - started, digest, changed, total)


def _up(version: int, parents: Mapping[int, int]) -> list[int]:
    """From it back to the first."""
    found = [version]
    while (parent := parents.get(found[-1])) is not None:
        found.append(parent)
    return found


def _way_to_anchor(version: int, parents: Mapping[int, int], anchors: set[int]) -> list[int] | None:
    """Of the way back to the first, or of all that there are."""
    before = anchors.intersection(_up(version, parents))
    return _way(version, before, parents) or _way(version, anchors, parents)


def _way(start: int, goals: Collection[int], parents: Mapping[int, int]) -> list[int] | None:
    """The shortest, along updates, from `start` to any of the goals; both ends included."""
    beside: dict[int, list[int]] = {}
    for version, parent in parents.items():
        beside.setdefault(version, []).append(parent)
        beside.setdefault(parent, []).append(version)
    came: dict[int, int] = {start: start}
    ahead = deque([start])
    while ahead:
        here = ahead.popleft()
        if here in goals:
            way = [here]
            while way[-1] != start:
                way.append(came[way[-1]])
            return way[::-1]
        for there in beside.get(here, []):
            if there not in came:
                came[there] = here
                ahead.append(there)
    return None


def _write_head(directory: Path, head: Mapping[str, Any]) -> None:
    (directory / _HEAD).write_text(json.dumps(head, allow_nan=False), encoding="utf-8")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As the file format wants them: each in memory of its own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _size(path: Path) -> int:
    return path.stat().st_size
