"""Adapters: where they may sit, and the reference that they leave behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainers import LORA, TOKENIZER, llama, logits, make_group, make_policy, make_step, make_trainer, same, snapshot

from tandem.bridge.inproc import InprocBridge
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import SpecError
from tandem.model.load_checkpoint import load_model
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.spec.model import LoraSpec
from tandem.types import MicroBatch

pytestmark = pytest.mark.usefixtures("one_thread")


# --- what they are for


def tied() -> Any:
    return make_model("tiny", TOKENIZER, seed=0)


@pytest.mark.parametrize("make", [tied, llama], ids=["tied", "untied"])
@pytest.mark.parametrize("table", ["embed_tokens", "model.embed_tokens", "lm_head"])
def test_embeddings_and_the_head_take_no_adapter(make: Any, table: str) -> None:
    module = make()
    assert (module.get_input_embeddings().weight is module.get_output_embeddings().weight) == (make is tied)
    with pytest.raises(SpecError) as refused:
        CausalPolicy(module, TOKENIZER, lora=LoraSpec(targets=("q_proj", table)))
    said = str(refused.value)
    assert said.startswith(f"model.lora.targets = ['q_proj', '{table}']: {table}: adapters are for linear layers")
    assert "leave them out, use 'all-linear', or leave [model.lora] out" in said


@pytest.mark.parametrize("make", [tied, llama], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "layers.0.mlp.up_proj")], ids=["all", "named"])
def test_an_export_is_the_policy_wherever_adapters_may_sit(make: Any, targets: Any, tmp_path: Path) -> None:
    import transformers

    policy = CausalPolicy(make(), TOKENIZER, lora=LoraSpec(targets=targets))
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.normal_(std=0.05)
    policy.export(tmp_path)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(served), logits(policy.module), atol=1e-4, rtol=0)


def test_an_adapter_names_no_path_of_this_machine(tmp_path: Path) -> None:
    """It is loaded elsewhere, on a base that lies elsewhere."""
    llama().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    module = load_model(str(tmp_path / "base"), "main", "sdpa")
    policy = CausalPolicy(module, TOKENIZER, lora=LoraSpec(rank=2))
    policy.export(tmp_path / "export")
    policy.deployer()(dict(policy.trainable()), tmp_path / "deploy")
    for file in [*(tmp_path / "export").rglob("*.*"), *(tmp_path / "deploy").rglob("*.*")]:
        assert str(tmp_path).encode() not in file.read_bytes(), file
    for place in (tmp_path / "export" / "adapter", tmp_path / "deploy"):
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] is None


# --- the reference


def warmed(steps: int = 2) -> CausalPolicy:
    policy = make_policy(LORA)
    train(policy, steps)
    return policy


def train(policy: CausalPolicy, steps: int = 2) -> None:
    trainer = make_trainer(policy)
    for seed in range(steps):
        trainer.step(make_step(make_group(seed)))


def probe(seed: int = 99) -> MicroBatch:
    (micro,) = make_step(make_group(seed), micro_tokens=1000).micro
    return micro


def size_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_the_reference_is_what_the_policy_said_then_at_the_cost_of_its_adapter() -> None:
    policy = warmed()
    adapter = [tensor for _, tensor in policy.trainable()]
    then = policy.score(probe(), 0.7)
    policy.keep_reference()
    train(policy)
    assert torch.equal(policy.reference_logprobs(probe(), 0.7), then)
    assert not torch.allclose(policy.score(probe(), 0.7), then, atol=1e-2)
    assert policy.reference_bytes() == size_bytes(adapter) < 0.5 * size_bytes(list(policy.module.parameters()))


def test_an_adapter_that_is_zero_is_switched_off_and_costs_nothing() -> None:
    policy = make_policy(LORA)
    then = policy.score(probe(), 1.0)
    policy.keep_reference()
    train(policy)
    assert policy.reference_bytes() == 0
    assert torch.equal(policy.reference_logprobs(probe(), 1.0), then)


def test_a_reference_kept_later_speaks_for_then() -> None:
    policy = warmed()
    policy.keep_reference()
    train(policy)
    then = policy.score(probe(), 1.0)
    policy.keep_reference()
    train(policy)
    assert torch.equal(policy.reference_logprobs(probe(), 1.0), then)


def test_the_reference_is_no_part_of_what_trains_travels_or_is_exported(tmp_path: Path) -> None:
    policy, twin = warmed(), warmed()
    policy.keep_reference()
    policy.reference_logprobs(probe(), 1.0)
    assert [name for name, _ in policy.trainable()] == [name for name, _ in twin.trainable()]
    names = [[name for name, _ in each.weights(1, "live").tensors()] for each in (policy, twin)]
    assert names[0] == names[1]
    for each, to in ((policy, "kept"), (twin, "without")):
        each.export(tmp_path / to)
        make_trainer(each).save(tmp_path / to / "state")
    files = [{file.relative_to(tmp_path / to): file.read_bytes() for file in (tmp_path / to).rglob("*.safetensors")}
             for to in ("kept", "without")]  # fmt: skip
    assert files[0] == files[1]
    assert len(files[0]) == 4  # the model, its adapter, weights and optimizer


def test_asking_the_reference_leaves_the_policy_its_memory_and_a_waiting_backward(monkeypatch: Any) -> None:
    policy, twin = warmed(), warmed()
    policy.keep_reference()
    train(policy), train(twin)
    before = [(tensor, tensor.data_ptr()) for _, tensor in policy.trainable()]
    loss = policy.logprobs(probe(), 1.0).logprobs_N.sum()
    policy.reference_logprobs(probe(5), 1.0)
    loss.backward()
    twin.logprobs(probe(), 1.0).logprobs_N.sum().backward()
    for (name, ours), (_, theirs) in zip(policy.trainable(), twin.trainable(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy.head, "hidden", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        policy.reference_logprobs(probe(), 1.0)
    assert all(tensor.data_ptr() == address for tensor, address in before)
    assert same(snapshot(policy), snapshot(twin))


def test_the_engine_knows_the_trainer_s_memory_again_after_the_reference_was_asked() -> None:
    policy, bridge = warmed(), InprocBridge(1.0)
    policy.keep_reference()

    async def play() -> int:
        engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
        try:
            await engine.attach(bridge.source(1))
            for version in (1, 2):
                await engine.sleep()
                policy.reference_logprobs(probe(), 1.0)
                bridge.send(policy.weights(version, "live"))
                await engine.load(version)
                await engine.wake()
            return engine.version
        finally:
            await engine.close()

    assert asyncio.run(play()) == 2
