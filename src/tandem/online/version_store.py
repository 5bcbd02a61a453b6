"""Versions on the disk: anchors hold all weights and the optimizer state, updates hold the changes since their parent.

`anchor-000010/` and `update-000012-from-000010/` are sealed directories (io/sealed_directory.py). They are never
changed, and a version number is never used again. Their names alone define the tree: training on after a rollback makes
a branch. The job store, not this one, says which versions are committed and which is active; `forget` removes the
others. One process writes; any may read.

A version is loaded from the nearest anchor before it and the updates between. Updates apply in both directions, so if
one of them is damaged, a later anchor does as well; but not its optimizer state, which has seen the later steps.
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
from tandem.online.weight_deltas import HeldVersion, Update, apply_updates, make_update

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
    """None: there is no update that leads to it."""
    anchored: bool


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    held: HeldVersion
    state: Mapping[str, Tensor] | None
    """Optimizer state of the anchor that was read; None if that anchor is later than the version."""
    state_version: int
    notes: Mapping[str, Any]
    """The anchor's notes."""


class VersionStore:
    """An anchor is due after `anchor_every` updates, or once their size exceeds `anchor_share` of the last anchor's."""

    def __init__(self, directory: Path, *, anchor_every: int = 16, anchor_share: float = 0.5, threads: int = 1) -> None:
        self.directory = directory
        self.damaged: dict[str, str] = {}
        """Directories that were found damaged, and why. They are not read again."""
        self.without_state: dict[str, str] = {}
        """Anchors whose optimizer state was found damaged, and why. Their weights are still used."""
        self._every, self._share, self._threads = anchor_every, anchor_share, threads

    # --- what is there

    def known(self) -> dict[int, Known]:
        """Return the versions on the disk, without damaged directories."""
        parents, anchors = self._names()
        return {version: Known(version, parents.get(version), version in anchors) for version in {*parents, *anchors}}

    def named(self) -> set[int]:
        """Return the versions that have any directory, damaged or not."""
        parents, anchors = self._names(damaged=True)
        return {*parents, *anchors}

    def anchor_due(self, version: int) -> bool:
        parents, anchors = self._names()
        path = _ancestors(version, parents)
        anchor = next((each for each in path if each in anchors), None)
        if anchor is None:
            return True
        updates = path[: path.index(anchor)]
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
        """Write weights and optimizer state, durably. CheckpointError if the weights differ from the digest in the
        update to this version. Call it on any thread; the tensors must not change meanwhile."""
        started, held = time.perf_counter(), HeldVersion.of(version, weights)
        parents, _ = self._names()
        if version not in parents:
            self._refuse_old(version)
        elif (expected := self._head(self._update(version, parents[version]))["digest"]) != held.digest:
            raise CheckpointError(
                f"anchor {version}: these weights have digest {held.digest}, but version {version} has {expected}"
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
        """Write the changes from `held` to `live`, durably. `held` becomes `version`; if this fails it stays its
        parent."""
        self._refuse_old(version)
        started, parent = time.perf_counter(), held.version
        if parent not in self.known():
            raise CheckpointError(f"{self.directory}: version {parent}, the parent of {version}, was never written")
        made = make_update(version, held, live, dict(notes or {}))
        path = self._update(version, parent)
        try:
            with sealed_directory.sealed(path) as directory:
                save_file({str(index): block.raw for index, block in enumerate(made.blocks)}, directory / _PLANES)
                _write_head(directory, made.head())
        except BaseException:
            with held.on_device_of(live):
                apply_updates(held, [lambda: made])
            raise
        return self._written(path, version, started, made.digest, made.changed, made.total)

    def forget(self, keep: Collection[int]) -> None:
        """Remove all directories that no version of `keep` needs. If a version cannot be loaded any more, what is left
        of it stays: it may be repaired."""
        parents, anchors = self._names()
        of_all, _ = self._names(damaged=True)
        if missing := sorted(set(keep) - self.named()):
            raise CheckpointError(f"{self.directory}: version {missing[0]} is to be kept, but is not there")
        paths = [_path_to_anchor(version, parents, anchors) or _ancestors(version, of_all) for version in keep]
        wanted = {version for path in paths for version in path}
        used = {path[-1] for path in paths}
        for version, parent in parents.items():
            if not {version, parent} <= wanted:
                sealed_directory.remove(self._update(version, parent))
        for version in anchors - used:
            sealed_directory.remove(self._anchor(version))

    def sweep(self) -> None:
        """Remove what a killed writer left unfinished. Only the writing process may call this."""
        sealed_directory.sweep(self.directory)

    # --- reading

    def load(self, version: int, device: str | torch.device = "cpu") -> LoadedVersion:
        """Load a version. CheckpointDamaged, with the reasons, if no undamaged path leads to it."""
        while True:
            parents, anchors = names = self._names()
            path = _path_to_anchor(version, parents, anchors)
            if path is None:
                raise CheckpointDamaged(
                    f"{self.directory}: no undamaged path leads from an anchor to version {version} ({self._reasons()})"
                )
            try:
                held, notes = self._read_anchor(path[-1], device)
                apply_updates(held, self._updates(path[::-1], parents), self._threads)
            except CheckpointDamaged:
                if names == self._names():
                    raise  # the files were good: another path would not help
                continue  # the damaged directory is known now: try another path
            if path[-1] in _ancestors(version, parents):
                return LoadedVersion(held, self._state(path[-1]), path[-1], notes)
            return LoadedVersion(held, None, path[-1], {})

    def state_of(self, version: int) -> tuple[Mapping[str, Tensor], int] | None:
        """Return the optimizer state of the nearest anchor at or before this version, and that anchor's version.
        Anchors with damaged state are skipped; weights are not checked."""
        parents, anchors = self._names(damaged=True)
        for each in _ancestors(version, parents):
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
        """Load this version, or else its nearest ancestor that is undamaged; also return what was found damaged.
        Damaged directories are renamed: only the writing process may call this."""
        parents, _ = self._names()
        reasons: list[str] = []
        for each in _ancestors(version, parents):
            try:
                loaded = self.load(each, device)
            except CheckpointDamaged as error:
                reasons.append(f"version {each}: {error}")
                continue
            reasons += [f"{name} is damaged, and was renamed to {aside}" for name, aside in self._set_aside().items()]
            reasons += [f"{name} has no optimizer state any more: {why}" for name, why in self.without_state.items()]
            return loaded, reasons
        raise CheckpointDamaged(
            f"{self.directory}: version {version} and all before it are damaged ({'; '.join(reasons)}); repair one of "
            "the files, or start in another directory"
        )

    def move(self, held: HeldVersion, version: int) -> str:
        """Change `held` to another version in place, by the updates between the two; return "". If no undamaged path
        leads there, read that version from an anchor and return why. If this fails, `held` stays as it was."""
        while True:
            parents, _ = self._names()
            path = _shortest_path(held.version, {version}, parents)
            if path is None:
                return self._move_all(held, version)
            try:
                apply_updates(held, self._updates(path, parents), self._threads)
                return ""
            except CheckpointDamaged:
                if self._names()[0] == parents:
                    raise

    def _move_all(self, held: HeldVersion, version: int) -> str:
        before = held.version
        device = next(iter(held.tensors.values())).device
        loaded = self.load(version, device).held
        loaded.restore(held.tensors)
        held.version, held.digests = version, loaded.digests
        return f"no updates lead from version {before} to {version} ({self._reasons()}): it was read from its anchor"

    # --- names

    def _anchor(self, version: int) -> Path:
        return self.directory / f"anchor-{version:06d}"

    def _update(self, version: int, parent: int) -> Path:
        return self.directory / f"update-{version:06d}-from-{parent:06d}"

    def _names(self, *, damaged: bool = False) -> tuple[dict[int, int], set[int]]:
        """Return the parent of each version that has an update, and the versions that have an anchor. `damaged`: count
        damaged directories, too."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        sound = [name for name in names if damaged or name not in self.damaged]
        parents = {int(match[1]): int(match[2]) for name in sound if (match := _UPDATE.fullmatch(name))}
        return parents, {int(match[1]) for name in sound if (match := _ANCHOR.fullmatch(name))}

    def _refuse_old(self, version: int) -> None:
        """CheckpointError unless the number is new. Damaged and unfinished directories count: clients may know them."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        newest = max((int(match[1]) for name in names if (match := _NUMBER.search(name))), default=-1)
        if version <= newest:
            raise CheckpointError(
                f"{self.directory}: version {newest} was there before; the next must be larger, not {version}"
            )

    # --- files

    def _updates(self, path: Sequence[int], parents: Mapping[int, int]) -> list[Callable[[], Update]]:
        """Return functions that read the updates along a path."""
        edges = ((there, here) if parents.get(there) == here else (here, there) for here, there in pairwise(path))
        return [partial(self._read_update, self._update(*edge)) for edge in edges]

    def _read_update(self, path: Path) -> Update:
        head, raw = self._head(path), load_file(path / _PLANES)
        return Update.from_head(head, [raw[str(index)] for index in range(len(raw))])

    def _read_anchor(self, version: int, device: str | torch.device) -> tuple[HeldVersion, dict[str, Any]]:
        path = self._anchor(version)
        head = self._head(path, only=[_HEAD, _WEIGHTS])
        weights = load_file(path / _WEIGHTS, device=str(device))  # mapped privately: writing does not change the file
        held = HeldVersion.of(version, weights)
        if held.digest != head["digest"]:
            raise CheckpointDamaged(f"{path}: its weights have digest {held.digest} instead of {head['digest']}")
        return held, head["notes"]

    def _head(self, path: Path, only: Collection[str] = ()) -> dict[str, Any]:
        """Verify a directory, or only these files, and read its head."""
        try:
            sealed_directory.verify(path, only)
        except CheckpointDamaged as error:
            if path.is_dir():  # else the whole store may be unreachable for a while
                self.damaged[path.name] = str(error)
            raise
        return json.loads((path / _HEAD).read_text(encoding="utf-8"))

    def _set_aside(self) -> dict[str, str]:
        present = [name for name in self.damaged if (self.directory / name).exists()]
        return {
            name: f"{sealed_directory.quarantine(self.directory / name).name} ({self.damaged[name]})"
            for name in present
        }

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.damaged.items()) or "they were removed"

    def _written(self, path: Path, version: int, started: float, digest: str, changed: int, total: int) -> StoredUpdate:
        size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return StoredUpdate(version, size_bytes, time.perf_counter() - started, digest, changed, total)


def _ancestors(version: int, parents: Mapping[int, int]) -> list[int]:
    """Return the version and its ancestors, back to the first."""
    found = [version]
    while (parent := parents.get(found[-1])) is not None:
        found.append(parent)
    return found


def _path_to_anchor(version: int, parents: Mapping[int, int], anchors: set[int]) -> list[int] | None:
    """Return the path to the nearest anchor among the ancestors, or else to the nearest of all."""
    before = anchors.intersection(_ancestors(version, parents))
    return _shortest_path(version, before, parents) or _shortest_path(version, anchors, parents)


def _shortest_path(start: int, goals: Collection[int], parents: Mapping[int, int]) -> list[int] | None:
    """Return the shortest path along updates from `start` to any of the goals, both ends included."""
    neighbours: dict[int, list[int]] = {}
    for version, parent in parents.items():
        neighbours.setdefault(version, []).append(parent)
        neighbours.setdefault(parent, []).append(version)
    previous: dict[int, int] = {start: start}
    frontier = deque([start])
    while frontier:
        here = frontier.popleft()
        if here in goals:
            path = [here]
            while path[-1] != start:
                path.append(previous[path[-1]])
            return path[::-1]
        for neighbour in neighbours.get(here, []):
            if neighbour not in previous:
                previous[neighbour] = here
                frontier.append(neighbour)
    return None


def _write_head(directory: Path, head: Mapping[str, Any]) -> None:
    (directory / _HEAD).write_text(json.dumps(head, allow_nan=False), encoding="utf-8")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy each tensor to its own host memory, as the file format needs."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _size(path: Path) -> int:
    return path.stat().st_size
