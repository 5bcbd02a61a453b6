"""Adapter tensors into vLLM's slots, without a file: and read back from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from vllm_cpu import Vllm, adapted, gap, small_model

from tandem.bridge.collective.sender import AdapterBroadcastBridge
from tandem.bridge.collective.shared_buffers import BufferWriter
from tandem.bridge.files.adapter import AdapterBridge
from tandem.engine.vllm.weight_update import whole
from tandem.model import served_weights
from tandem.types import Weights

PROMPT = [5, 17, 33, 90, 121, 7, 64]
NEAR, FAR = 0.001, 0.05  # float32


class Pair:
    def __init__(self, vllm: Vllm, module: Any) -> None:
        self.vllm, self.module = vllm, module
        self.bridge: Any = AdapterBridge(deadline_s=5)
        self.attach()
        self.version = 0

    def attach(self) -> None:
        source = self.bridge.source()
        self.reply = self.vllm.call("tandem_attach", dict(source.link))
        assert "error" not in self.reply, self.reply
        source.attached({**self.reply, "devices": [self.reply["device"]]})

    def send(self, wrapped: Any) -> tuple[Any, Any]:
        self.version += 1
        inner = wrapped.base_model.model
        weights = Weights(
            self.version, "adapter", lambda: served_weights.adapter(inner), served_weights.adapter_config(wrapped)
        )
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(self.vllm.call, "tandem_load", self.version)
            return self.bridge.send(weights), answer.result()


@pytest.fixture(scope="module")
def pair(start: Callable[..., Vllm], tmp_path_factory: Any) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("base")
    module = small_model(dtype=torch.float32, tie_word_embeddings=True)
    module.save_pretrained(path)
    made = Pair(start(model=str(path), dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8), module)
    yield made
    made.bridge.close()


def test_the_base_under_the_adapters_is_the_trainers(pair: Pair):
    from tandem.ops.digest import fingerprints

    shapes = {name: shape for name, (_, shape) in pair.reply["layout"].items()}
    ours = fingerprints(dict(served_weights.base(pair.module)))
    assert whole(pair.reply["pieces"], shapes) == ours


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "up_proj"]])
@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_served_as_the_trainer_computes_it(pair: Pair, targets: Any, rank: int, rslora: bool):
    wrapped = adapted(pair.module, seed=pair.version + 1, rank=rank, targets=targets, rslora=rslora)
    sent, answer = pair.send(wrapped)
    name = answer["adapter"]
    told = pair.vllm.generate(PROMPT, adapter=name, number=pair.version)[0]
    assert gap(wrapped, PROMPT, told) < NEAR
    assert gap(pair.module, PROMPT, told) > FAR
    proven = pair.vllm.call("tandem_adapter", name)
    assert whole(proven["pieces"], proven["shapes"]) == dict(sent.fingerprints)
    assert gap(pair.module, PROMPT, pair.vllm.generate(PROMPT)[0]) < NEAR  # and the base is as it was


def test_more_versions_than_slots_come_and_go_and_each_is_itself(pair: Pair):
    told: list[tuple[Any, str, int]] = []
    for seed in range(4):
        wrapped = adapted(pair.module, seed=100 + seed)
        _, answer = pair.send(wrapped)
        told.append((wrapped, answer["adapter"], pair.version))
        assert gap(wrapped, PROMPT, pair.vllm.generate(PROMPT, adapter=told[-1][1], number=pair.version)[0]) < NEAR
    for wrapped, name, number in told:  # pushed out of their slots since, and loaded again
        assert gap(wrapped, PROMPT, pair.vllm.generate(PROMPT, adapter=name, number=number)[0]) < NEAR


def test_a_slot_that_was_changed_is_seen(pair: Pair):
    sent, answer = pair.send(adapted(pair.module, seed=200, targets=["q_proj"]))
    name = answer["adapter"]
    pair.vllm.generate(PROMPT, adapter=name, number=pair.version)
    slots = "worker.model_runner.lora_manager._adapter_manager"
    where = (
        f"m = {slots}; s = m.lora_index_to_id.index({pair.version}); l = m.modules['model.layers.0.self_attn.qkv_proj']"
    )
    pair.vllm.do("plant", code=f"{where}; l.lora_b_stacked[0][s, 0, 3, 1] += 1")
    proven = pair.vllm.call("tandem_adapter", name)
    assert whole(proven["pieces"], proven["shapes"]) != dict(sent.fingerprints)
    pair.vllm.do("plant", code=f"{where}; l.lora_b_stacked[0][s, 0, 3, 1] -= 1; l.lora_b_stacked[1][s, 0, 0, 0] = 1")
    assert "the padding is not zero" in pair.vllm.call("tandem_adapter", name)["error"]["message"]


def test_an_adapter_in_no_slot_proves_nothing(pair: Pair):
    _, answer = pair.send(adapted(pair.module, seed=300))
    assert "in no slot" in pair.vllm.call("tandem_adapter", answer["adapter"])["error"]["message"]


def test_a_rank_that_the_slots_do_not_hold_is_refused(pair: Pair):
    _, answer = pair.send(adapted(pair.module, seed=400, rank=16))
    assert "--max-lora-rank 8" in answer["error"]["message"]


def test_an_adapter_comes_by_memory_that_both_processes_map(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """One that was spoiled on its way leaves the one before as it is, and a new meeting goes on."""
    files, pair.bridge = pair.bridge, AdapterBroadcastBridge(deadline_s=30, backend="ipc")
    held: list[tuple[Any, str, int]] = []

    def send_one(seed: int) -> None:
        wrapped = adapted(pair.module, seed=seed)
        sent, answer = pair.send(wrapped)
        assert sent.transport == {"requested": "ipc", "engaged": "memory", "why": ""}
        held.append((wrapped, answer["adapter"], pair.version))
        for trained, name, number in held[-2:]:
            assert gap(trained, PROMPT, pair.vllm.generate(PROMPT, adapter=name, number=number)[0]) < NEAR
        proven = pair.vllm.call("tandem_adapter", answer["adapter"])
        assert whole(proven["pieces"], proven["shapes"]) == dict(sent.fingerprints)

    def spoil(self: Any, buffer: torch.Tensor, deadline: Any) -> int:
        buffer[100] += 1
        return tell(self, buffer, deadline)

    tell = BufferWriter.broadcast
    pair.attach()
    for seed in (600, 601):
        send_one(seed)
    with monkeypatch.context() as patch:
        patch.setattr(BufferWriter, "broadcast", spoil)
        _, answer = pair.send(adapted(pair.module, seed=602))
        assert "is not what was sent" in answer["error"]["message"]
    wrapped, name, number = held[-1]
    assert gap(wrapped, PROMPT, pair.vllm.generate(PROMPT, adapter=name, number=number)[0]) < NEAR
    pair.attach()
    send_one(603)
    pair.bridge.close()
    pair.bridge = files
    pair.attach()


def test_a_dropped_adapter_frees_its_slot(pair: Pair):
    _, answer = pair.send(adapted(pair.module, seed=500))
    pair.vllm.generate(PROMPT, adapter=answer["adapter"], number=pair.version)
    assert answer["adapter"] not in pair.vllm.call("tandem_drop", answer["adapter"])["adapters"]
    assert "error" in pair.vllm.call("tandem_adapter", answer["adapter"])
