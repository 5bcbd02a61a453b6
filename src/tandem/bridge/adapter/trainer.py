"""adapter, the trainer's end: what PEFT saves, in memory-backed storage, in a directory of its own each version.

The file is put together where the tensors are, its header with them, and written in one piece.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from tandem.bridge.file_bytes import Writing
from tandem.bridge.outgoing import Form
from tandem.bridge.packed import Laying
from tandem.bridge.versions import FilesBridge, header_of
from tandem.bridge.wire import Entry, Places
from tandem.ops.phases import Phases
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

    def _stem(self, name: str) -> str:
        return _FILE

    def _tensors(
        self,
        weights: Weights,
        into: Mapping[str, Form],
        shards: Mapping[str, Mapping[str, Form]],
        directory: Path,
        still_wanted: Callable[[], None],
        phases: Phases,
    ) -> tuple[Mapping[str, Entry], Fingerprints]:
        flat, fingerprints = self._laying.lay(weights, self._replies, phases)
        with (directory / _FILE).open("wb") as file, closing(Writing(still_wanted)) as writing:
            writing.write(file.fileno(), flat.raw, 0)
            writing.finish()
        phases.end("move")
        return flat.places.tensors, fingerprints

    def _accompany(self, directory: Path, weights: Weights, shards: Mapping[str, Mapping[str, Form]]) -> None:
        config = json.dumps({**_PLAIN, **weights.adapter}, indent=2)
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")


def _laid_out(into: Mapping[str, Form]) -> tuple[Places, bytes]:
    """As the file has them."""
    header, offsets = header_of(into)
    places = {name: Entry(*into[name], len(header) + offset, _FILE) for name, offset in offsets.items()}
    return Places(places), header


def memory_backed() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
