"""Passes of several kinds, each launched kernel by kernel at first, and on a GPU as a CUDA graph from then on.

A pass of a small model is hundreds of launches, each of which takes the host longer than the GPU. A graph is one
launch. A pass is recorded once it has been run by launches, so that no kernel is compiled meanwhile. A graph holds
addresses: it is dropped when the cache or the weights move.

Shapes: N rows of a pass's result, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.hf.kv_cache import KvCache
from tandem.ops.batched_launches import record_graph

_log = logging.getLogger(__name__)

DEVICES = ("cuda",)
"""Types of devices that have graphs."""
_NEAR = 0.1
"""Largest relative difference between two ways, which in 16 bits are rounded at every operation."""
_RUNS_BEFORE = 2
"""A kind that comes up once, as a number of rows while a batch ends, is not worth a graph."""


class PassKind(NamedTuple):
    """What passes have in common that one graph serves."""

    size: int
    """Rows, or the width of a prompt."""
    adapters: int
    """0 without adapters; another number once these have moved."""


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result_NV: Tensor


class GraphsByKind:
    def __init__(self, what: str, cache: KvCache, device: torch.device, *, most_rows: int) -> None:
        """`what`: names the passes in a warning if they cannot be recorded. `most_rows`: of a result."""
        self._what, self._cache, self._device, self._most_rows = what, cache, device, most_rows
        self._recorded, self._runs = dict[PassKind, _Recorded](), Counter[PassKind]()
        self._results_NV: Tensor | None = None
        self._addresses: Sequence[int] = ()
        self._cache_moved, self._pool = -1, None
        self.why_not = "" if device.type in DEVICES else "graphs are for GPUs"
        """Why passes are launched; empty if they are recorded."""

    @property
    def sizes(self) -> list[int]:
        """The sizes that there is a graph of."""
        return [kind.size for kind in self._recorded]

    def weights_at(self, addresses: Sequence[int]) -> None:
        """The weights of the next passes are there. Graphs of weights that are elsewhere are dropped."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._drop()

    def run(self, kind: PassKind, launch: Callable[[], Tensor], *, by_launches: bool = False) -> Tensor:
        """Return what `launch` returns, [N, V]; valid until the next call. `by_launches`: this pass is not like others
        of its kind."""
        if self._cache.moved != self._cache_moved:
            self._cache_moved = self._cache.moved
            self._drop()
        if by_launches:
            return launch()
        if (known := self._recorded.get(kind)) is not None:
            known.graph.replay()
            return known.result_NV
        result_NV = launch()
        self._runs[kind] += 1
        if self._runs[kind] >= _RUNS_BEFORE and not self.why_not:
            self._record(kind, launch, result_NV)
        return result_NV

    def _record(self, kind: PassKind, launch: Callable[[], Tensor], like_NV: Tensor) -> None:
        for other in [each for each in self._recorded if kind.adapters and each.adapters not in (0, kind.adapters)]:
            del self._recorded[other]
        if self._results_NV is None:
            self._results_NV = like_NV.new_empty(self._most_rows, like_NV.shape[1])
        if not self._recorded:
            self._pool = torch.cuda.graph_pool_handle()  # the last graph of a pool takes it along
        into_NV = self._results_NV[: len(like_NV)]
        try:
            graph = record_graph(lambda: into_NV.copy_(launch()), self._device, self._pool)
        except RuntimeError as error:
            self.why_not = first_line(error)
            _log.warning("%s are launched one by one from now on: %s", self._what, self.why_not)
        else:
            self._recorded[kind] = _Recorded(graph, into_NV)

    def _drop(self) -> None:
        self._recorded.clear()
        self._runs.clear()

    def try_out(self, launch: Callable[[], Tensor], into: Tensor, expected: Tensor) -> None:
        """Record `launch`, which has been run, and set `why_not` if that cannot be done, or gives another result."""
        if self.why_not:
            return
        try:
            graph = record_graph(lambda: into.copy_(launch()), self._device)
            into.zero_()
            graph.replay()
        except RuntimeError as error:
            self.why_not = first_line(error)
        else:
            self.why_not = why_far(into, expected, f"recorded {self._what} give another result")


def why_far(found: Tensor, expected: Tensor, what: str) -> str:
    """Return what is wrong and by how much; empty if a result is the expected one but for rounding."""
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    return "" if off < _NEAR else f"{what} ({off:.3f} of the norm)"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
