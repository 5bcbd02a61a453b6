"""Few launches for many small tensors: a launch takes longer than the bytes of a small tensor.

`Copying` copies many tensors by few calls. On a CPU, each call releases the interpreter and may wait to get it back.
`Replay` repeats launches over memory that stays: on a GPU it captures a CUDA graph at the second run and replays it
from then on. Handing over a thousand addresses takes a millisecond, and launching a Triton kernel a tenth of one.

While a graph is captured, no other thread of the process may draw random numbers on that GPU, because torch captures
its generator too. Code that may run beside sampling or training therefore uses no graphs (`alone=False`).
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_recording = RLock()
_SMALL_BYTES = 2**20  # a larger tensor is copied by itself, at full memory speed


class Replay:
    def __init__(
        self, launch: Callable[[], None], devices: Set[torch.device], what: str, *, alone: bool = True
    ) -> None:
        """`launch`: does the work on `devices`. On a single GPU it enqueues on the current stream and, after its first
        run, neither allocates nor waits. `what`: names the work in a warning if no graph can be captured; it is then
        launched each time. `alone`: no other thread draws random numbers on that GPU meanwhile."""
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
        try:
            return record_graph(self._launch, self._device)
        except RuntimeError as error:
            _log.warning("%s are launched one by one: no graph could be made of them: %s", self._what, error)
            return None


def record_graph(launch: Callable[[], object], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return what `launch` does as a CUDA graph; RuntimeError if it waits for the GPU, or allocates outside of torch.
    It has been run before. Graphs of one `pool` share its memory: no two of them run at a time.

    All graphs of a device are recorded on one stream, since cuBLAS keeps memory for each pair of a thread and a stream,
    32 MiB on a Hopper. So graphs with matrix products share that memory, too, and are all replayed on one stream."""
    graph = torch.cuda.CUDAGraph()
    with _recording, torch.cuda.stream(_recorder(device)):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads continue with their work
        try:
            launch()
        finally:
            graph.capture_end()
    return graph


@cache
def _recorder(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Copying:
    """Repeats the same copies: the second tensor of each pair into the first. No two write the same memory."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        small: defaultdict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self._large = list[tuple[Tensor, Tensor]]()
        for into, source in pairs:
            if into.nbytes <= _SMALL_BYTES:
                targets, sources = small[into.device, source.device, into.dtype, source.dtype]
                targets.append(into)
                sources.append(source)
            else:
                self._large.append((into, source))
        self._small = list(small.values())
        devices = {tensor.device for pair in self._large for tensor in pair}
        devices |= {tensors[0].device for each in self._small for tensors in each}
        self._replay = Replay(self._copy, devices, "copies")

    def run(self) -> None:
        self._replay.run()

    @torch.no_grad()
    def _copy(self) -> None:
        for into, source in self._large:
            into.copy_(source)
        for targets, sources in self._small:
            _foreach_copy(targets, sources)


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects, and at least one: then what was derived from them still fits. The
    caller must keep them alive, or an address could be reused by another object."""
    return len(some) == len(others) > 0 and all(map(operator.is_, some, others))


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, once."""
    Copying(pairs).run()
