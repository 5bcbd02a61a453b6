"""A version on its way, on a thread of its own: what is served meanwhile goes on being served.

consumes: the engine's end of a bridge        waits for: the other end, within the link's deadline
produces: one version, looked at, or an error
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tandem.ops.phase_timer import Phases
from tandem.protocols import WeightSource
from tandem.types import Weights
from tandem.vllm_worker.overwrite import Moves


@dataclass(frozen=True, slots=True)
class Arrived:
    weights: Weights
    tensors: Mapping[str, Tensor]
    moves: Moves
    """Of a full version: what goes where."""
    seconds: Mapping[str, float]


Look: TypeAlias = Callable[[Weights, Mapping[str, Tensor]], Moves]


class Incoming:
    def __init__(self, source: WeightSource, version: int, rank: int, device: torch.device, look: Look) -> None:
        """`look`: at what arrived, before anybody is asked to wait for it."""
        self.version = version
        self._source, self._rank, self._device, self._look = source, rank, device, look
        self._future: Future[Arrived] = Future()
        threading.Thread(target=self._run, name=f"incoming {version}", daemon=True).start()

    def here(self, patience_s: float | None) -> bool:
        """Whether it is here within that time, or something is wrong with it. None: for as long as the link says."""
        if not self._future.done():
            try:
                self._future.exception(patience_s)
            except TimeoutError:
                return False
        return True

    def take(self) -> Arrived:
        """Or its error. Waits."""
        return self._future.result()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first one
            self._future.set_result(self._receive())
        except BaseException as error:  # noqa: BLE001 - whoever takes it raises it
            self._future.set_exception(error)

    def _receive(self) -> Arrived:
        phases = Phases()
        weights = self._source.receive(self.version, self._rank)
        phases.end("wait")
        tensors = dict(weights.tensors())
        moves = self._look(weights, tensors)
        phases.end("check")
        return Arrived(weights, tensors, moves, phases.seconds)
