"""A callback that profiles a step of a run, after `$TRACE_AFTER` others: `callbacks = ["one_step.py:OneStep"]`.

It writes into the file `$TRACE` how long the GPU of rank 0 computed, how long it only sent or received (no other
kernel ran), and how long it did nothing, with the kernels that took most; of the longest times without a kernel, what
the host did meanwhile; and how often memory was asked of the driver, or given back to it. The profiler slows a step
down: compare the parts, not their sum.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[int, int]
FEW, GAP_NS = 25, 500_000
MEMORY = ("num_alloc_retries", "num_device_alloc", "num_device_free", "reserved_bytes.all.peak")


class OneStep:
    def __init__(self) -> None:
        self._seen, self._profile = 0, None

    def on_step(self, step: Any) -> None:
        self._seen += 1
        if self._seen == int(os.environ["TRACE_AFTER"]):
            torch.cuda.synchronize()
            self._memory = memory()
            self._profile = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            self._profile.__enter__()
        elif self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            found = parts_of(self._profile.profiler.kineto_results, step.metrics["time/step_s"])
            found |= {"memory": {name: [self._memory[name], now] for name, now in memory().items()}}
            Path(os.environ["TRACE"]).write_text(json.dumps(found))
            self._profile = None


def memory() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: stats.get(name, 0) for name in MEMORY}


def parts_of(results: Any, step_s: float) -> dict[str, Any]:
    sent, computed, by_name = list[Span](), list[Span](), defaultdict[str, float](float)
    host: list[tuple[int, int, str]] = []
    for event in results.events():
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            host.append((*span, event.name()))
        elif event.duration_ns():
            (sent if event.name().startswith("nccl") else computed).append(span)
            by_name[event.name()[:90]] += event.duration_ns() / 1e9
    both, busy = joined(sent + computed), joined(computed)
    most = sorted(by_name.items(), key=lambda each: -each[1])[:FEW]
    return {
        "step_s": step_s, "computed_s": length(busy), "sent_s": length(joined(sent)),
        "only_sent_s": length(both) - length(busy), "idle_s": step_s - length(both), "kernels": dict(most),
        "gaps": told_gaps(both, host),
    }  # fmt: skip


def joined(spans: list[Span]) -> list[Span]:
    """Their union."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans) / 1e9


def told_gaps(busy: list[Span], host: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """The longest times between kernels: where in the step, and which calls of the host filled most of each."""
    gaps = [(a[1], b[0]) for a, b in pairwise(busy) if b[0] - a[1] > GAP_NS]
    host.sort()
    longest = max((stop - start for start, stop, _ in host), default=0)
    told: list[dict[str, Any]] = []
    for start, stop in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:FEW]:
        inside = defaultdict[str, int](int)
        for place in range(bisect_left(host, (start - longest, 0, "")), bisect_left(host, (stop, 0, ""))):
            first, last, name = host[place]
            inside[name] += max(0, min(last, stop) - max(first, start))
        most = sorted(inside.items(), key=lambda each: -each[1])[:6]
        at = (start - busy[0][0]) / 1e9
        told.append({"at_s": at, "ms": (stop - start) / 1e6, "host_ms": {name[:60]: ns / 1e6 for name, ns in most}})
    return told
