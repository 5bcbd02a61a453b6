"""The next version, looked for before anybody asks for it: what takes time is over when somebody does.

Nothing is said to the trainer, and nothing is taken. Its announcement is read, and where all of it lies in memory that
is lent (lent.py), it is copied out at a venture. Whoever asks for the version claims it then, as ever: that the claim
succeeds says that nobody has written there since it was announced. If it fails, the copy is of no worth.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from tandem.bridge.deadline import Deadline, leave_to_a_thread
from tandem.bridge.flat import Flat
from tandem.bridge.wire import Manifest

_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """An announcement, and the copy."""

    sequence: int
    manifest: Manifest
    flat: Flat


class Ahead:
    def __init__(self, find: Callable[[], Found], device: torch.device) -> None:
        self._find, self._device = find, device
        self._found: Found | None = None
        self._ended = threading.Event()
        leave_to_a_thread(self._run)

    def found(self, what_failed: str, deadline: Deadline) -> Found | None:
        """Waits for it. None: something went wrong, and whoever looks himself finds out what."""
        deadline.wait(self._ended, what_failed)
        return self._found

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first one, or had another
            self._found = self._find()
        except Exception as error:  # noqa: BLE001 - nobody has asked yet
            _log.debug("the next version was not found ahead: %s", error)
        finally:
            self._ended.set()
