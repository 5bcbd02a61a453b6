"""The trainer's end of `disk` and `restart`: write each version as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from torch import Tensor

from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import TensorEntry, as_bytes
from tandem.bridge.common.packer import Form, forms, outgoing
from tandem.bridge.files.parallel_io import Writing
from tandem.bridge.files.safetensors_header import begun
from tandem.bridge.files.writer import FilesBridge
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Sent, WeightKind, Weights

if TYPE_CHECKING:
    from tandem.bridge.files.rank_files import RankFiles

Shards: TypeAlias = dict[str, dict[str, Form]]
"""The tensors of each file."""
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_NO_COMPANIONS = ("*.index.json", "adapter_*", "tandem.json")  # they describe other weights
_MODEL = "model.safetensors"
_BUFFERS = "buffers.tandem"  # not *.safetensors: engines load every such file


class CheckpointBridge(FilesBridge):
    carries: WeightKind = "full"

    def __init__(
        self,
        directory: Path,
        skeleton: Path,
        *,
        buffers: Collection[str] = (),
        deadline_s: float = 60.0,
        shard_bytes: int = 5 * 2**30,
        rank_files: RankFiles | None = None,
    ) -> None:
        """`skeleton`: where config and tokenizer are copied from. `buffers`: names that engines serve and checkpoints
        lack (rotary tables); they go to a separate file, which no engine loads by mistake. `rank_files`: rank 0's end
        of what several ranks write; the others call `RankFiles.write` when this end sends."""
        if not (skeleton / "config.json").is_file():
            raise SyncError(f"{self.mode}: skeleton = '{skeleton}' has no config.json; give it a model's directory")
        super().__init__(directory, deadline_s, private=False)
        self._buffers, self._shard_bytes, self._rank_files = frozenset(buffers), shard_bytes, rank_files
        self._common = self._home.path / "common"
        self._common.mkdir()
        for file in _companions(skeleton):  # a copy: with a link, a change to a version would change the model
            shutil.copyfile(file, self._common / file.name)

    @property
    def rank_link(self) -> Mapping[str, Any]:
        """What the other ranks need to take part in a version: they learn its directory when it is written."""
        return {}

    def send(self, weights: Weights) -> Sent:
        with self._rank_files.telling() if self._rank_files is not None else nullcontext():
            return super().send(weights)

    def _in_time(self, deadline: Deadline, write: Callable[[], Any], failed: str) -> Any:
        if self._rank_files is None:
            return super()._in_time(deadline, write, failed)
        return write()  # the ranks go in step: none may leave the others. The crew names one that stands still.

    def _put(
        self, weights: Weights, directory: Path, still_wanted: Callable[[], None], phases: Phases
    ) -> tuple[Mapping[str, TensorEntry], Fingerprints]:
        into = forms(weights, self._replies, self.mode)
        shards = self._shards(into)
        with begun(directory, shards) as (files, entries):
            if self._rank_files is not None:
                fingerprints = self._rank_files.write(weights, phases, directory, still_wanted)
            else:
                fingerprints = self._write_tensors(
                    outgoing(weights, into, self.mode), files, entries, still_wanted, phases
                )
        for file in self._common.iterdir():
            os.link(file, directory / file.name)
        if _MODEL not in shards:
            _write_index(directory, {file: part for file, part in shards.items() if file != _BUFFERS})
        return entries, fingerprints

    def _write_tensors(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        files: Mapping[str, BinaryIO],
        entries: Mapping[str, TensorEntry],
        still_wanted: Callable[[], None],
        phases: Phases,
    ) -> Fingerprints:
        """Write one tensor after the other, as each is made: there is no memory for a second copy of the model."""
        fingerprints: dict[str, str] = {}
        with closing(Writing(still_wanted)) as writing:
            for name, tensor, fingerprints[name] in digest.fingerprinted(tensors, phases):
                raw = as_bytes(tensor)
                phases.end("gather")
                writing.write(files[entries[name].file].fileno(), raw, entries[name].offset)
                phases.end("move")
            writing.finish()
        return fingerprints

    def _shards(self, into: Mapping[str, Form]) -> Shards:
        files: dict[str, dict[str, Form]] = {}
        for name, form in into.items():
            files.setdefault(_BUFFERS if name in self._buffers else _MODEL, {})[name] = form
        parts = _split(files.pop(_MODEL, {}), self._shard_bytes)
        if len(parts) == 1:
            return {_MODEL: parts[0], **files}
        return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, 1)} | files


class DiskBridge(CheckpointBridge):
    """The engine reads the checkpoint in place."""

    mode = "disk"


class RestartBridge(CheckpointBridge):
    """The engine's process starts again from the checkpoint."""

    mode = "restart"


def _companions(skeleton: Path) -> list[Path]:
    found = {path for pattern in _COMPANIONS for path in skeleton.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not any(map(path.match, _NO_COMPANIONS)))


def _split(part: Mapping[str, Form], most_bytes: int) -> list[dict[str, Form]]:
    parts: list[dict[str, Form]] = [{}]
    filled = 0
    for name, form in part.items():
        size = _size(form)
        if parts[-1] and filled + size > most_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = form
        filled += size
    return parts


def _write_index(directory: Path, shards: Mapping[str, Mapping[str, Form]]) -> None:
    index = {
        "metadata": {"total_size": sum(_size(form) for part in shards.values() for form in part.values())},
        "weight_map": {name: file for file, part in shards.items() for name in part},
    }
    (directory / f"{_MODEL}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _size(form: Form) -> int:
    return TensorEntry(*form).size_bytes
