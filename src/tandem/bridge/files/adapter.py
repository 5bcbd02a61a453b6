"""adapter, the trainer's end: what PEFT saves, in memory-backed storage, in a directory of its own each version.

The file is put together where the tensors are, its header with them, and goes there in one piece: into one of a
version before the last two, where every engine has copied those (bridge/files/reusable_files.py), or else into a new
one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from tandem.bridge.common.manifest import Places, TensorEntry
from tandem.bridge.common.packer import Form, Laying
from tandem.bridge.files.parallel_io import Writing
from tandem.bridge.files.reusable_files import Sheets
from tandem.bridge.files.safetensors_header import header_of
from tandem.bridge.files.writer import FilesBridge
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, WeightKind, Weights

_MEMORY = Path("/dev/shm")
_FILE = "adapter_model.safetensors"
_PLAIN = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "inference_mode": True}


class AdapterBridge(FilesBridge):
    mode = "adapter"
    carries: WeightKind = "adapter"

    def __init__(self, directory: Path | None = None, *, deadline_s: float = 60.0) -> None:
        """Without a directory: the machine's shared memory, readable by this user alone."""
        super().__init__((directory or memory_backed()).resolve(), deadline_s, private=True)
        self._laying = Laying(self.mode, _laid_out)
        self._sheets = Sheets(self._home.path)
        self._why_new = "sync.directory is given: who reads it may be on another machine" if directory else ""

    def close(self) -> None:
        super().close()
        self._sheets.close()

    @property
    def _transport(self) -> Mapping[str, str]:
        return {"requested": "auto", "engaged": "new files" if (why := self._why_not_again()) else "files", "why": why}

    def _why_not_again(self) -> str:
        """Why each version is a new file; empty if it is not."""
        if self._why_new:
            return self._why_new
        copied = bool(self._replies) and all(reply.get("copied") for reply in self._replies)
        return "" if copied else "an engine may go on reading a version where it lies"

    def _put(
        self, weights: Weights, directory: Path, still_wanted: Callable[[], None], phases: Phases
    ) -> tuple[Mapping[str, TensorEntry], Fingerprints]:
        flat, fingerprints = self._laying.lay(weights, self._replies, phases)
        if self._why_not_again():
            self._sheets.drop_spare()
            with (directory / _FILE).open("wb") as file, closing(Writing(still_wanted)) as writing:
                writing.write(file.fileno(), flat.raw, 0)
                writing.finish()
        else:
            self._sheets.put(flat.raw, directory / _FILE)
        config = json.dumps({**_PLAIN, **weights.adapter}, indent=2)
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")
        phases.end("move")
        return flat.places.tensors, fingerprints

    def _forget(self, version: Path) -> None:
        self._sheets.take_back(version / _FILE)
        super()._forget(version)


def _laid_out(into: Mapping[str, Form]) -> tuple[Places, bytes]:
    """As the file has them."""
    header, offsets = header_of(into)
    places = {name: TensorEntry(*into[name], len(header) + offset, _FILE) for name, offset in offsets.items()}
    return Places(places), header


def memory_backed() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
