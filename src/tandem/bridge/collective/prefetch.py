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

from tandem.bridge.common.deadline import Deadline, leave_to_a_thread
from tandem.bridge.common.manifest import Manifest
from tandem.bridge.common.packer import Flat
from tandem.errors import SyncError

_log = logging.getLogger(__name__)


class PrefetchedVersion(NamedTuple):
    """An announcement, and the copy."""

    sequence: int
    manifest: Manifest
    flat: Flat


class LookAhead:
    def __init__(self, find: Callable[[], PrefetchedVersion], device: torch.device) -> None:
        self._device = device
        self._found: PrefetchedVersion | None = None
        self._ended = threading.Event()
        leave_to_a_thread(lambda: self._run(find))

    def found(self, what_failed: str, deadline: Deadline) -> PrefetchedVersion | None:
        """Waits for it. None: something went wrong, and whoever looks himself finds out what."""
        deadline.wait(self._ended, what_failed)
        return self._found

    def _run(self, find: Callable[[], PrefetchedVersion]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first one, or had another
            self._found = find()
        except SyncError:
            """None came, or none that could be copied."""
        except RuntimeError as error:
            _log.warning("a version was not copied before it was asked for: %s", error)
        finally:
            self._ended.set()
