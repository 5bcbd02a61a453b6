"""One end of a bridge, either one, in a process of its own. It answers each line of JSON with one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WATCHED = ("tandem", "transformers", "safetensors", "pydantic", "peft", "tokenizers")


class EngineEnd:
    """Imports of Tandem what an engine's own environment has, and no more."""

    def open(self, link: dict[str, Any]) -> dict[str, Any]:
        from tandem.vllm_worker.weight_sources import open_source

        self._source = open_source(link)
        return {"modules": [name for name in sys.modules if name.partition(".")[0] in _WATCHED]}

    def receive(self, version: int) -> dict[str, Any]:
        weights = self._source.receive(version)
        return {"bits": bits(weights.tensors()), "path": weights.path}


class TrainerEnd:
    def make(self, wanted: list[Any]) -> dict[str, Any]:
        from bridges import COPYING

        name, at, deadline_s = wanted
        self._bridge = COPYING[name](Path(at), deadline_s)
        return {}

    def meet(self, _: None) -> dict[str, Any]:
        from bridges import meet

        return {"link": dict(meet(self._bridge).link)}

    def send(self, wanted: list[Any]) -> dict[str, Any]:
        """Sends it, and on demand a signal to itself in the middle of it."""
        from bridges import struck_while_sending, weights_of

        version, signal_number = wanted
        weights = weights_of(version, self._bridge.carries)
        if signal_number:
            weights = struck_while_sending(weights, self._bridge.mode, partial(os.kill, os.getpid(), signal_number))
        self._bridge.send(weights)
        return {}


def bits(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, tensor in tensors:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    return found


def main() -> None:
    engine, trainer = EngineEnd(), TrainerEnd()
    verbs: dict[str, Callable[[Any], dict[str, Any]]] = {
        "open": engine.open,
        "receive": engine.receive,
        "make": trainer.make,
        "meet": trainer.meet,
        "send": trainer.send,
    }
    for line in sys.stdin:
        verb, argument = json.loads(line)
        started = time.monotonic()
        try:
            answer = verbs[verb](argument)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
