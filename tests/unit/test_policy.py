"""A policy: adapters, export, the reference, activations."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from trainers import (
    LORA,
    TOKENIZER,
    llama,
    logits,
    make_group,
    make_policy,
    make_step,
    make_trainer,
    snapshot,
)

from tandem.algo import dr_grpo
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import SpecError
from tandem.model import served_weights
from tandem.model.policy import CausalPolicy
from tandem.spec.algorithm import DrGrpoSpec
from tandem.spec.model import LoraSpec
from tandem.train.batch_packing import plain_row
from tandem.types import Batch, MicroBatch, Sampling, Totals

pytestmark = pytest.mark.usefixtures("one_thread")

# --- adapters


def test_lora_trains_adapters_and_nothing_else() -> None:
    policy = make_policy(LORA)
    assert {name.split(".")[-3] for name, _ in policy.trainable()} == {"lora_A", "lora_B"}
    assert not any("lm_head" in name for name, _ in policy.trainable())
    before, trainer = snapshot(policy), make_trainer(policy)
    for seed in range(3):
        trainer.step(make_step(make_group(seed)))
    after = snapshot(policy)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name, _ in policy.trainable()}


def test_targets_that_the_model_has_not_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"model.lora.targets = \['no_such_proj'\]"):
        make_policy(LoraSpec(targets=("no_such_proj",)))
    with pytest.raises(SpecError, match=r"\['q_proj', 'no_such_proj'\]: this model has no no_such_proj"):
        make_policy(LoraSpec(targets=("q_proj", "no_such_proj")))


def trained_adapters() -> CausalPolicy:
    policy = make_policy(LORA)
    trainer = make_trainer(policy, lr=lambda step: 5e-2)
    for seed in range(3):
        trainer.step(make_step(make_group(seed)))
    assert (logits(policy.module) - logits(llama().eval())).abs().max() > 0.1
    return policy


def test_an_adapter_is_served_as_the_very_same_tensors_with_the_values_of_now() -> None:
    """B times its scale in float32, as engines get it; and when the parameters' memory is another one, of that."""

    def expected() -> dict[str, Tensor]:
        return {
            name: tensor
            for each in served_weights.adapted(policy.module)
            for name, tensor in ((each.a_name, each.a.clone()), (each.b_name, each.b.float() * each.scale))
        }

    def served() -> dict[str, Tensor]:
        return dict(policy.weights(1, "adapter").tensors())

    def as_they_should_be(tensors: dict[str, Tensor]) -> bool:
        right = expected()
        return tensors.keys() == right.keys() and all(torch.equal(tensors[name], right[name]) for name in right)

    policy = trained_adapters()
    first = served()
    assert as_they_should_be(first)
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.add_(0.37)
    second = served()
    assert as_they_should_be(second)
    assert all(second[name] is first[name] for name in first)
    _, moved = policy.trainable()[0]
    moved.data = moved.data + 1
    assert as_they_should_be(served())
    for _, tensor in policy.trainable():
        tensor.data = tensor.data.bfloat16()
    third = served()
    assert as_they_should_be(third)
    assert {tensor.dtype for name, tensor in third.items() if ".lora_B." in name} == {torch.float32}


def test_exported_weights_are_merged_and_give_the_adapted_models_logits(tmp_path: Path) -> None:
    policy = trained_adapters()
    expected = logits(policy.module)
    policy.export(tmp_path)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert merged.state_dict().keys() == llama().state_dict().keys()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    assert torch.equal(logits(policy.module), expected), "exporting leaves the policy as it was"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_the_exported_adapter_loads_with_peft(tmp_path: Path) -> None:
    policy = trained_adapters()
    policy.export(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), logits(policy.module), atol=1e-6, rtol=0)


def test_a_full_export_is_the_model_with_its_tokenizer(tmp_path: Path) -> None:
    policy = make_policy()
    make_trainer(policy).step(make_step(make_group(1)))
    policy.export(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(policy.module))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("naïve €", add_special_tokens=False) == TOKENIZER.encode(
        "naïve €", add_special_tokens=False
    )
    assert tokenizer.chat_template == TOKENIZER.chat_template


# --- the reference


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("warm_steps", [0, 2])
def test_the_reference_is_the_policy_as_it_was_when_rl_began(lora: LoraSpec | None, warm_steps: int) -> None:
    policy = make_policy(lora)
    (probe,) = make_step(make_group(99), micro_tokens=1000).micro
    from_scratch = policy.score(probe, 1.0)
    warm = make_trainer(policy)
    for seed in range(warm_steps):
        warm.step(make_step(make_group(seed)))
    policy.keep_reference()
    expected = policy.score(probe, 1.0)
    algorithm = dr_grpo.make(DrGrpoSpec(kl_coef=0.1))
    trainer = make_trainer(policy, algorithm, version=warm_steps)
    divergence = [trainer.step(make_step(make_group(9), algorithm=algorithm))["loss/kl"] for _ in range(3)]
    assert torch.equal(policy.reference_logprobs(probe, 1.0), expected)
    assert (policy.score(probe, 1.0) - expected).abs().max() > 1e-2
    assert (warm_steps > 0) == ((from_scratch - expected).abs().max() > 1e-2)
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert min(divergence[1:]) > 1e-2


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_divergence_is_that_of_whole_distributions_and_is_held_down(lora: LoraSpec | None) -> None:
    policy, first = make_policy(lora), 8
    micro = plain_row(range(40), first, torch.device("cpu"))
    then_TV = logits(policy.module)[0, :, : len(TOKENIZER)].log_softmax(-1)
    policy.keep_reference()
    assert policy.divergence(micro).abs().max() < 1e-6
    make_trainer(policy).step(make_step(make_group(0)))
    now_TV = logits(policy.module)[0, :, : len(TOKENIZER)].log_softmax(-1)
    away_N = policy.divergence(micro)
    torch.testing.assert_close(away_N, (then_TV.exp() * (then_TV - now_TV)).sum(-1)[first - 1 : -1], atol=1e-5, rtol=0)
    micro.hold = 1.0 / len(away_N)
    trainer = make_trainer(policy)
    held = [trainer.step(Batch([micro], Totals(1, 1), {"tokens/credited": 1.0}))["loss/held"] for _ in range(6)]
    assert held[0] == pytest.approx(away_N.mean().item(), rel=1e-4)
    assert held[-1] < max(held) / 2  # Adam goes too far at first


def test_the_reference_is_no_part_of_what_trains_or_travels() -> None:
    policy = make_policy()
    policy.keep_reference()
    names = [name for name, _ in policy.module.named_parameters()]
    assert [name for name, _ in policy.trainable()] == names
    buffers = [name for name, _ in policy.module.named_buffers()]
    assert [name for name, _ in policy.weights(3, "live").tensors()] == names + buffers


# --- activations


def gradients(policy: CausalPolicy, batch: Batch) -> dict[str, Tensor]:
    """And leaves none behind."""
    for micro in batch.micro:
        policy.logprobs(micro, 1.0).logprobs_N.sum().backward()
    out = {name: tensor.grad for name, tensor in policy.trainable() if tensor.grad is not None}
    policy.module.zero_grad(set_to_none=True)
    return out


def saved_elements(policy: CausalPolicy, micro: MicroBatch) -> int:
    """What forward keeps for backward."""
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(micro, 1.0)
    return sum(kept)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_activation_checkpointing_keeps_less_and_gives_the_same_gradients(lora: LoraSpec | None) -> None:
    plain, checkpointed = make_policy(lora), make_policy(lora, activations="recompute")
    for policy in (plain, checkpointed):
        torch.manual_seed(3)
        with torch.no_grad():
            for _, tensor in policy.trainable():
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    batch = make_step(make_group(1), make_group(2))
    expected, found = gradients(plain, batch), gradients(checkpointed, batch)
    assert found.keys() == expected.keys() == {name for name, _ in plain.trainable()}
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)
    assert saved_elements(checkpointed, batch.micro[0]) < 0.5 * saved_elements(plain, batch.micro[0])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_engine_samples_the_same_from_a_checkpointed_model_between_steps(lora: LoraSpec | None) -> None:
    def sample(policy: CausalPolicy) -> Any:
        async def go() -> Any:
            engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
            try:
                return await engine.generate([1, 2, 3], Sampling(max_tokens=20, seed=1))
            finally:
                await engine.close()

        return asyncio.run(go())

    plain, checkpointed = make_policy(lora), make_policy(lora, activations="recompute")
    for policy in (plain, checkpointed):
        make_trainer(policy).step(make_step(make_group(1)))
    expected, found = sample(plain), sample(checkpointed)
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    make_trainer(checkpointed).step(make_step(make_group(2)))


@pytest.mark.parametrize("activations", ["keep", "selective", "recompute"])
def test_dropout_is_never_on(activations: Any) -> None:
    """A policy with dropout would be another one than the engine samples from."""
    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=2, n_positions=64, embd_pdrop=0.5, resid_pdrop=0.5,
        attn_pdrop=0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    policy = CausalPolicy(transformers.GPT2LMHeadModel(config), TOKENIZER, activations=activations)
    for micro in make_step(make_group(1)).micro:
        assert torch.equal(policy.logprobs(micro, 1.0).logprobs_N.detach(), policy.score(micro, 1.0))
    batch = make_step(make_group(1))
    first, again = gradients(policy, batch), gradients(copy.deepcopy(policy), batch)
    assert all(torch.equal(first[name], again[name]) for name in first)
