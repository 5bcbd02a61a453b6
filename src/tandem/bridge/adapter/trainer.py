"""adapter, the trainer's end: what PEFT saves, in memory-backed storage, in a directory of its own each version."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tandem.bridge.outgoing import Form
from tandem.bridge.versions import FilesBridge
from tandem.types import WeightKind, Weights

_MEMORY = Path("/dev/shm")
_PLAIN = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "inference_mode": True}


class AdapterBridge(FilesBridge):
    mode = "adapter"
    carries: WeightKind = "adapter"

    def __init__(self, directory: Path | None = None, *, deadline_s: float = 60.0) -> None:
        """Without a directory: the machine's shared memory, readable by this user alone."""
        super().__init__((directory or memory_backed()).resolve(), deadline_s, private=True)

    def _stem(self, name: str) -> str:
        return "adapter_model.safetensors"

    def _accompany(self, directory: Path, weights: Weights, shards: Mapping[str, Mapping[str, Form]]) -> None:
        config = json.dumps({**_PLAIN, **weights.adapter}, indent=2)
        (directory / "adapter_config.json").write_text(config, encoding="utf-8")


def memory_backed() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
