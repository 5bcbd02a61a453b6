"""The same launches again and again, in memory that stays: on a GPU from the second time on one launch, of a graph.

To hand over a thousand addresses takes a millisecond, and a kernel of Triton's a tenth of one. While a graph is made,
no other thread of the process may draw random numbers on that GPU: torch lets its generator take part. So code that may
run beside sampling or training does without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

import torch

_log = logging.getLogger(__name__)


class Replay:
    def __init__(
        self, launch: Callable[[], None], devices: Set[torch.device], what: str, *, alone: bool = True
    ) -> None:
        """`launch`: works on these. Of one GPU it enqueues on the current stream, and neither allocates nor waits there
        once it has run; what goes from one device to another may wait. `what`: is launched one by one if no graph can
        be made of it. `alone`: no other thread draws random numbers there meanwhile."""
        self._launch, self._what = launch, what
        self._device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self._has_run, self._tried = False, self._device.type != "cuda" or not alone
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        if self._has_run and not self._tried:
            self._graph, self._tried = self._captured(), True
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch()
        self._has_run = True

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")  # others go on with theirs
                try:
                    self._launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            _log.warning("%s are launched one by one: no graph could be made of them: %s", self._what, error)
            return None
        return graph
