"""A callback that profiles a step of a run, after `$TRACE_AFTER` others: `callbacks = ["one_step.py:OneStep"]`.

It writes into the file `$TRACE` how long the GPU of rank 0 computed, how long it only sent or received (no other
kernel ran), and how long it did nothing, with the kernels that took most. The profiler slows a step down: compare the
parts, not their sum.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class OneStep:
    def __init__(self) -> None:
        self._seen, self._profile = 0, None

    def on_step(self, step: Any) -> None:
        self._seen += 1
        if self._seen == int(os.environ["TRACE_AFTER"]):
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        elif self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            seconds = step.metrics["time/step_s"]
            Path(os.environ["TRACE"]).write_text(json.dumps(parts_of(self._profile.profiler.kineto_results, seconds)))
            self._profile = None


def parts_of(results: Any, step_s: float) -> dict[str, Any]:
    sent, computed, by_name = list[tuple[int, int]](), list[tuple[int, int]](), defaultdict[str, float](float)
    for event in results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            span = (event.start_ns(), event.start_ns() + event.duration_ns())
            (sent if event.name().startswith("nccl") else computed).append(span)
            by_name[event.name()[:90]] += event.duration_ns() / 1e9
    both, busy = length(sent + computed), length(computed)
    most = sorted(by_name.items(), key=lambda each: -each[1])[:25]
    return {
        "step_s": step_s, "computed_s": busy, "sent_s": length(sent), "only_sent_s": both - busy,
        "idle_s": step_s - both, "kernels": dict(most),
    }  # fmt: skip


def length(spans: list[tuple[int, int]]) -> float:
    """Of their union, in seconds."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9
