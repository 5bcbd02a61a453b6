"""One end of a bridge in a process of its own. It answers each line of JSON with one."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def bits(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, tensor in tensors:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    return found


def engine() -> None:
    """Imports of Tandem what an engine's own environment has, and no more."""
    source: Any = None
    for line in sys.stdin:
        what, argument = json.loads(line)
        answer: dict[str, Any]
        started = time.monotonic()
        try:
            if what == "open":
                source = importlib.import_module(f"tandem.bridge.{argument['mode']}.engine").open(argument)
                answer = {"modules": [name for name in sys.modules if name.partition(".")[0] in _WATCHED]}
            else:
                weights = source.receive(argument)
                answer = {"bits": bits(weights.tensors()), "expected": dict(weights.expected), "path": weights.path}
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - started}), flush=True)


_WATCHED = ("tandem", "transformers", "safetensors", "pydantic", "peft", "tokenizers")


def trainer(mode: str, at: Path, deadline_s: float) -> None:
    """Sends what it is told to, and a signal to itself in the middle of it."""
    from bridges import COPYING, meet, struck_while_sending, weights_of

    bridge = COPYING[mode](at, deadline_s)
    for line in sys.stdin:
        what, argument = json.loads(line)
        if what == "meet":
            answer: Mapping[str, Any] = meet(bridge).link
        else:
            version, signal_number = argument
            weights = weights_of(version, bridge.carries)
            if signal_number:
                weights = struck_while_sending(weights, mode, partial(os.kill, os.getpid(), signal_number))
            answer = {"fingerprints": dict(bridge.send(weights).fingerprints)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine()
    else:
        trainer(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
