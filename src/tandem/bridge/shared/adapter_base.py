"""The base that adapters stand upon, once in memory: the engine's, which a trainer on the same GPU maps and reads.

Nobody writes there: the engine serves a base that stays as it is, and the trainer's is frozen. That both hold the same
values is proven whenever an engine is attached, before anything is mapped (ops/adapter_base_check.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.shared import cuda_ipc
from tandem.errors import SyncError
from tandem.ops.device_names import device_name
from tandem.ops.option_report import requested

_log = logging.getLogger(__name__)


class BorrowedBase:
    """Whether the engine's memory is used, and why not. What was mapped of an engine before stays, until another
    engine's takes its place: whoever trains upon it must not lose it."""

    def __init__(self, device: torch.device, stand_on: Callable[[Mapping[str, Tensor]], int]) -> None:
        """`stand_on`: the trainer goes on in that memory; how many bytes that saves."""
        self._device, self._stand_on = device, stand_on
        self._mapped: Any = None
        self._bytes, self._why_not = 0, "no engine was attached yet"

    def state(self) -> dict[str, Any]:
        return requested(True, self._why_not, bytes=self._bytes)

    def met(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """`engines`: what they said when they were attached, and were found to serve the trainer's base."""
        none: Mapping[str, Any] = {"why_not": "the engine lends none"}
        lent: list[Mapping[str, Any]] = [reply.get("base_memory") or none for reply in engines]
        exported = [each.get("exported") for each in lent]
        if self._mapped is not None and exported == [self._mapped]:
            return
        ours = device_name(self._device)
        if why_not := next((each["why_not"] for each in lent if each["why_not"]), ""):
            self._none(why_not)
        elif len(lent) != 1 or exported[0] is None or exported[0]["device"] != ours:
            self._none(f"the engine's memory is not on the trainer's GPU, {ours}")
        else:
            try:
                self._bytes = self._stand_on(cuda_ipc.Mapped(exported[0]).tensors)
            except SyncError as error:
                return self._none(str(error))
            self._mapped, self._why_not = exported[0], ""
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what the trainer's own copy took
            _log.info("base: %d bytes of it are the engine's memory", self._bytes)

    def _none(self, why: str) -> None:
        """The trainer's base stays where it is: a copy of its own, or an engine's memory from before."""
        self._why_not = why
        _log.info("base: not the engine's memory: %s", why)
