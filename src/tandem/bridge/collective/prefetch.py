"""Prefetch the next version: copy it before the engine asks for it.

The worker sends the trainer no message and claims nothing. It reads the announcement and, if all of the version is in
shared buffers (shared_buffers.py), copies it out speculatively. When the engine asks for the version, the worker claims
the announcement as usual. If the claim succeeds, nothing was written there since the announcement, so the copy is good.
If it fails, the copy is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from tandem.bridge.common.deadline import Deadline, run_on_thread
from tandem.bridge.common.manifest import Manifest
from tandem.bridge.common.packer import Flat
from tandem.errors import SyncError

_log = logging.getLogger(__name__)


class PrefetchedVersion(NamedTuple):
    """An announcement, and the copy of its version."""

    sequence: int
    manifest: Manifest
    flat: Flat


class Prefetch:
    def __init__(self, find: Callable[[], PrefetchedVersion], device: torch.device) -> None:
        self._device = device
        self._found: PrefetchedVersion | None = None
        self._ended = threading.Event()
        run_on_thread(lambda: self._run(find))

    def found(self, what_failed: str, deadline: Deadline) -> PrefetchedVersion | None:
        """Return the prefetched version, and wait for it. None after a failure: the caller then reads the announcement
        itself and meets the same error."""
        deadline.wait(self._ended, what_failed)
        return self._found

    def _run(self, find: Callable[[], PrefetchedVersion]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread uses the first GPU, a reused one any
            self._found = find()
        except SyncError:
            """No version came, or none that could be copied."""
        except RuntimeError as error:
            _log.warning("a version could not be prefetched: %s", error)
        finally:
            self._ended.set()
