"""Share the base model of adapters: a trainer on the engine's GPU maps the engine's copy instead of its own.

Neither process writes there: the engine's base never changes, and the trainer's is frozen. Each time that an engine is
attached, both are proven to hold the same values before anything is mapped (ops/adapter_base_check.py).
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
    """The engine's base weights, mapped for the trainer if possible. A mapping of an earlier engine stays until another
    one replaces it, because the trainer computes with it."""

    def __init__(self, device: torch.device, stand_on: Callable[[Mapping[str, Tensor]], int]) -> None:
        """`stand_on`: moves the trainer's base to that memory; returns how many bytes that saves."""
        self._device, self._stand_on = device, stand_on
        self._mapped: Any = None
        self._bytes, self._why_not = 0, "no engine was attached yet"

    def state(self) -> dict[str, Any]:
        return requested(True, self._why_not, bytes=self._bytes)

    def attached(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """Map the base of newly attached engines. `engines`: their replies; they were proven to serve the trainer's
        base."""
        none: Mapping[str, Any] = {"why_not": "the engine shares no memory"}
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
                torch.cuda.empty_cache()  # frees the trainer's own copy
            _log.info("base: %d bytes of it are the engine's memory", self._bytes)

    def _none(self, why: str) -> None:
        """Leave the trainer's base where it is: in its own copy, or in the memory of an earlier engine."""
        self._why_not = why
        _log.info("base: not the engine's memory: %s", why)
