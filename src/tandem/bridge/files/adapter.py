"""The trainer's end of `adapter`: write each adapter as PEFT saves it, in memory-backed storage.

Each version has its own directory. The file's content, header included, is packed on the device of the tensors and
written in one piece. It overwrites the file of an older version if every engine copies what it reads
(bridge/files/reusable_files.py); otherwise it is a new file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from tandem.bridge.common.manifest import Placement, TensorEntry
from tandem.bridge.common.packer import AdapterPacker, Form
from tandem.bridge.files.parallel_io import Writing
from tandem.bridge.files.reusable_files import ReusableFiles
from tandem.bridge.files.safetensors_header import METADATA
from tandem.bridge.files.writer import FilesBridge
from tandem.io.file_system import memory_backed
from tandem.io.safetensors_format import header_of
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, WeightKind, Weights

_FILE = "adapter_model.safetensors"
_PLAIN = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "inference_mode": True}


class AdapterBridge(FilesBridge):
    mode = "adapter"
    carries: WeightKind = "adapter"

    def __init__(self, directory: Path | None = None, *, deadline_s: float = 60.0) -> None:
        """Without a directory, use the machine's shared memory, readable by this user alone."""
        super().__init__((directory or memory_backed()).resolve(), deadline_s, private=True)
        self._packer = AdapterPacker(self.mode, _layout)
        self._reusable = ReusableFiles(self._home.path)
        self._why_new = "sync.directory is given: an engine on another machine may read it" if directory else ""

    def close(self) -> None:
        super().close()
        self._reusable.close()

    @property
    def _transport(self) -> Mapping[str, str]:
        return {"requested": "auto", "engaged": "new files" if (why := self._why_not_reused()) else "files", "why": why}

    def _why_not_reused(self) -> str:
        """Return why each version is a new file; empty if files are reused."""
        if self._why_new:
            return self._why_new
        copied = bool(self._replies) and all(reply.get("copied") for reply in self._replies)
        return "" if copied else "an engine may go on reading a version in its file"

    def _put(
        self, weights: Weights, directory: Path, still_wanted: Callable[[], None], phases: Phases
    ) -> tuple[Mapping[str, TensorEntry], Fingerprints]:
        flat, fingerprints = self._packer.pack(weights, self._replies, phases)
        if self._why_not_reused():
            self._reusable.drop_spare()
            with (directory / _FILE).open("wb") as file, closing(Writing(still_wanted)) as writing:
                writing.write(file.fileno(), flat.raw, 0)
                writing.finish()
        else:
            self._reusable.put(flat.raw, directory / _FILE)
        config = json.dumps({**_PLAIN, **weights.adapter}, indent=2)
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")
        phases.end("move")
        return flat.places.tensors, fingerprints

    def _forget(self, version: Path) -> None:
        self._reusable.take_back(version / _FILE)
        super()._forget(version)


def _layout(into: Mapping[str, Form]) -> tuple[Placement, bytes]:
    """Return where tensors are in the file, and its header."""
    header, stored = header_of(into, METADATA)
    places = {name: TensorEntry(*into[name], tensor.offset, _FILE) for name, tensor in stored.items()}
    return Placement(places), header
