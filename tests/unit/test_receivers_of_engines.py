"""Engines of one connection: each takes its own receivers, from the rank that its link names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tandem.bridge.collective.sender import BroadcastBridge
from tandem.types import Weights
from tandem.vllm_worker.weight_sources import open_source


def test_two_engines_of_one_connection_both_get_the_version() -> None:
    tensors = {"w": torch.arange(12.0).view(3, 4)}
    bridge = BroadcastBridge(deadline_s=10.0)
    source = bridge.source(2)
    for number in range(2):
        source.attached({"boot_id": f"engine-{number}", "layout": {"w": ["float32", [3, 4]]}})
    engines = [open_source({**source.link, "rank": rank}) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(engine.receive, 1) for engine in engines]
        bridge.send(Weights(1, "full", lambda: iter(tensors.items())))
        for answer in answers:
            assert torch.equal(dict(answer.result(timeout=10).tensors())["w"], tensors["w"])
    bridge.close()
