"""What every engine's end is, whatever the wire."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import need
from tandem.errors import SyncError
from tandem.types import WeightKind


class EngineEndBase:
    def __init__(self, link: Mapping[str, Any], mode: str, carries: WeightKind) -> None:
        """`link` is the trainer's, as it came out of JSON."""
        self.link = link
        self.carries: WeightKind = carries
        self.replies: list[Mapping[str, Any]] = []
        """What engines said when they were attached. The trainer's end reads them off the object that it handed out."""
        self._mode = mode
        if link.get("mode") != mode:
            raise SyncError(f"{mode}: the link is of mode {link.get('mode')!r}; both ends must use one sync.bridge")
        self._deadline_s = self._need("deadline_s", float)
        self._given_up = threading.Event()

    @property
    def reply(self) -> Mapping[str, Any]:
        return self.replies[-1] if self.replies else {}

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.replies.append(reply)

    def house(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Weights are copied: the engine's stay where they are."""
        return None

    def arrive_in_one_place(self) -> bool:
        """Whoever asks for that has copied an adapter before it asks for the next one: each may come to where the one
        before lies, as the very same tensors. Whether they do."""
        return False

    def looks_itself(self) -> bool:
        """Whoever says that compares each adapter with `expected` where it will be served, before it answers: to
        digest it on arrival would say the same twice. Whether that is left to it now."""
        return False

    def look_ahead(self, rank: int = 0) -> None:
        """Whoever says that has copied the adapter that it received last, and will ask for another."""

    def close(self) -> None:
        """Whoever waits stops waiting."""
        self._given_up.set()

    def _need(self, key: str, kind: type[Any]) -> Any:
        return need(self.link, key, kind, f"{self._mode}: the link")

    def deadline(self) -> Deadline:
        return Deadline(self._mode, self._deadline_s, self._given_up)
