"""Write the report while the run goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.obs.report import write_report

_log = logging.getLogger(__name__)

_EVERY_S = 60.0
_SHARE = 0.01  # most of the time that writing may take


class ReportWriter:
    """Writes `report.html` on a thread of its own: at most every minute, and for one hundredth of the time."""

    def __init__(
        self, run_dir: Path, permit: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`permit` raises if the run belongs to another process, which then writes its report."""
        self._run_dir, self._permit, self._clock = run_dir, permit, clock
        self._due = clock() + _EVERY_S
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Begin to write if it is time. Called after each step; returns at once."""
        if self._clock() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._write, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a report that is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        started = self._clock()
        try:
            self._permit()
            write_report(self._run_dir)
        except Exception:  # noqa: BLE001 - a report must not end the run that it tells of
            _log.exception("the report could not be written; it is tried again")
        took = self._clock() - started
        self._due = self._clock() + max(_EVERY_S, took / _SHARE)
