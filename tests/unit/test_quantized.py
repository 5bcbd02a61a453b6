"""A frozen base in 8 or 4 bits: near the exact model, one arithmetic for trainer and engine, adapters that learn."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainers import make_group, make_step

from tandem.build import built_model
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import SpecError
from tandem.model import quantized_base
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

TOKENIZER = byte_tokenizer()
CPU = torch.device("cpu")
Base = Literal["int8", "nf4"]
BASES: list[Base] = ["int8", "nf4"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights as wide as trained ones', so that logits depend on all of them."""
    path, module = tmp_path_factory.mktemp("model"), make_model("tiny", TOKENIZER, seed=5)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if "proj" in name:
                tensor.mul_(4)
        # As in trained models: a few hidden features are far larger than the rest. 8 bits of bitsandbytes' own treat
        # them apart, in whichever batch they come up.
        module.model.embed_tokens.weight[:, 3] *= 200
    CausalPolicy(module, TOKENIZER).export(path)
    return str(path)


def built(path: str, base: Any, precision: Any = None, **options: Any) -> built_model.BuiltModel:
    lora = LoraSpec(rank=4, base=base)
    return built_model.model(PathModel(path=path, lora=lora, **options), precision or Float32Precision(), 0, CPU)


def refusal(path: str, base: Base, **options: Any) -> str:
    with pytest.raises(SpecError) as refused:
        built(path, base, **options)
    return str(refused.value)


def move_adapter(policy: CausalPolicy) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.normal_(std=0.05)


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(40)[None]).logits.float()


def gradients(policy: CausalPolicy) -> dict[str, Tensor]:
    out = policy.module(input_ids=torch.arange(40)[None]).logits.float()
    loss = -out[0, :-1].log_softmax(-1)[torch.arange(39), torch.arange(1, 40)].mean()
    names, tensors = zip(*policy.trainable(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, tensors), strict=True))


def size_bytes(policy: CausalPolicy) -> int:
    linear = [part.weight for name, part in policy.module.named_modules() if name.endswith("base_layer")]
    assert len(linear) == 28
    return sum(tensor.numel() * tensor.element_size() for tensor in linear)


# --- what it computes


@pytest.mark.parametrize(("base", "error"), [("int8", 0.04), ("nf4", 0.4)])
@pytest.mark.parametrize("precision", [Float32Precision(), Bfloat16Precision()], ids=["float32", "bfloat16"])
def test_logits_are_near_the_exact_model_s(saved: str, base: Base, error: float, precision: Any):
    """As a share of the spread of the logits; each kind must also be worse than it could be, or it is not engaged."""
    exact, few = logits(built(saved, "exact").policy.module), logits(built(saved, base, precision).policy.module)
    gap = ((few - exact).square().mean().sqrt() / exact.std()).item()
    assert error / 50 < gap < error


@pytest.mark.parametrize(("base", "at_most"), [("int8", 0.2501), ("nf4", 0.1251)])
def test_linear_layers_take_a_quarter_and_an_eighth_of_their_memory(saved: str, base: Base, at_most: float):
    exact, few = built(saved, "exact").policy, built(saved, base).policy
    assert size_bytes(few) <= at_most * size_bytes(exact)
    assert len(quantized_base.quantized_parts(few.module)) == 28
    linear = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    other = sum(tensor.numel() for name, tensor in few.module.named_parameters() if "base_layer" not in name)
    assert quantized_base.share(few.module) == pytest.approx(linear / (linear + other))
    assert quantized_base.share(exact.module) == 0


@pytest.mark.parametrize("base", BASES)
def test_16_bits_for_the_rest_where_the_weights_have_16(saved: str, base: Base):
    module = built(saved, base, Bfloat16Precision()).policy.module
    assert module.get_input_embeddings().weight.dtype == module.config.dtype == torch.bfloat16
    assert {tensor.dtype for name, tensor in module.named_parameters() if "lora_" in name} == {torch.float32}


@pytest.mark.parametrize("base", BASES)
def test_gradients_are_those_of_a_plain_model_with_the_weights_that_the_bits_stand_for(saved: str, base: Base):
    few = built(saved, base).policy
    plain = quantized_base.merged(few.module)  # its adapter is zero yet
    reference = CausalPolicy(plain, TOKENIZER, lora=LoraSpec(rank=4))
    for policy in (few, reference):
        move_adapter(policy)
    with torch.inference_mode():  # the engine comes first: it must leave the weights as they are
        few.module(input_ids=torch.arange(40)[None])
    ours, theirs = gradients(few), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("activations", ["recompute", "selective"])
def test_activations_may_be_computed_again(saved: str, base: Base, activations: Any):
    plain, again = built(saved, base).policy, built(saved, base, activations=activations).policy
    for policy in (plain, again):
        move_adapter(policy)
    expected = gradients(plain)
    with again.activations.watching():
        found = gradients(again)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("base", BASES)
def test_an_optimizer_step_moves_the_adapter_and_nothing_else(saved: str, base: Base):
    policy = built(saved, base).policy
    before = {name: tensor.detach().clone() for name, tensor in policy.module.named_parameters()}
    descent = torch.optim.SGD([tensor for _, tensor in policy.trainable()], lr=0.1)
    for _ in range(2):  # B is zero at first, so A moves only in the second step
        for (_, tensor), gradient in zip(policy.trainable(), gradients(policy).values(), strict=True):
            tensor.grad = gradient
        descent.step()
    moved = {name for name, tensor in policy.module.named_parameters() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, _ in policy.trainable()}
    assert all(".lora_" in name for name in moved)


@pytest.mark.parametrize("base", BASES)
def test_the_engine_s_logprobs_are_the_trainer_s(saved: str, base: Base):
    """Sampled in a batch with others and by single tokens, scored alone and whole."""
    policy = built(saved, base).policy
    move_adapter(policy)

    async def sample() -> Any:
        engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
        prompts = [[1, 2, 3], list(range(20)), [200, 7]]
        try:
            asked = (engine.generate(prompt, Sampling(max_tokens=10, seed=9)) for prompt in prompts)
            return list(zip(prompts, await asyncio.gather(*asked), strict=True))
        finally:
            await engine.close()

    for prompt, completion in asyncio.run(sample()):
        ids = torch.tensor([[*prompt, *completion.ids]])
        with torch.no_grad():
            logprobs = policy.module(input_ids=ids).logits[0, :, : len(TOKENIZER)].float().log_softmax(-1)
        scored = logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), scored, atol=2e-4, rtol=0)


@pytest.mark.parametrize("base", BASES)
def test_the_reference_is_the_policy_of_then_on_the_same_few_bits(saved: str, base: Base):
    policy = built(saved, base).policy
    (probe,) = make_step(make_group(99), micro_tokens=1000).micro
    move_adapter(policy)
    then = policy.score(probe, 1.0)
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.mul_(2)
    assert torch.equal(policy.reference_logprobs(probe, 1.0), then)
    assert not torch.allclose(policy.score(probe, 1.0), then, atol=1e-3)
    assert policy.reference_bytes() == sum(4 * tensor.numel() for _, tensor in policy.trainable())


# --- what it leaves behind


@pytest.mark.parametrize("base", BASES)
def test_an_export_has_all_its_bits_and_the_policy_s_logits(saved: str, base: Base, tmp_path: Path):
    policy = built(saved, base).policy
    zero = logits(policy.module)
    move_adapter(policy)
    expected = logits(policy.module)
    policy.export(tmp_path)
    assert (expected - zero).abs().max() > 0.1
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(Path(saved) / "model.safetensors").keys()
    served = built_model.model(
        PathModel(path=str(tmp_path)), Float32Precision(), 0, CPU
    ).policy.module  # as `serve` does
    torch.testing.assert_close(logits(served), expected, atol=1e-3, rtol=0)
    assert torch.equal(logits(policy.module), expected), "exporting leaves the policy as it was"


@pytest.mark.parametrize("base", BASES)
def test_its_adapter_is_a_warm_start_on_few_bits(saved: str, base: Base, tmp_path: Path):
    policy = built(saved, base).policy
    move_adapter(policy)
    policy.export(tmp_path)
    again = built(saved, base, warm_start=str(tmp_path / "adapter")).policy
    assert torch.equal(logits(again.module), logits(policy.module))


# --- what is refused


def test_a_full_warm_start_cannot_be_loaded_over_few_bits(saved: str, tmp_path: Path):
    CausalPolicy(make_model("tiny", TOKENIZER, seed=1), TOKENIZER).export(tmp_path)
    assert "set model.path to it, and leave warm_start out" in refusal(saved, "nf4", warm_start=str(tmp_path))


def test_without_the_package_the_way_out_is_told(saved: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_base, "find_spec", lambda name: None)
    assert refusal(saved, "nf4") == (
        "model.lora.base = 'nf4': bitsandbytes is not installed; pip install 'tandem-rl[quantized]', or set "
        "model.lora.base = 'exact'"
    )
    built(saved, "exact")  # needs none


def test_a_model_without_a_layer_in_few_bits_is_refused(saved: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_base, "quantized_parts", lambda module: [])
    assert "has no linear layer that bitsandbytes supports" in refusal(saved, "int8")


@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_that_lacks_weights_is_refused_in_few_bits_too(saved: str, base: Base, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "faulty")
    tensors = load_file(tmp_path / "faulty" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "faulty" / "model.safetensors", metadata={"format": "pt"})
    told = "weights are 1 missing from it (model.layers.1.mlp.up_proj.weight)"
    assert told in refusal(str(tmp_path / "faulty"), base)


@pytest.mark.parametrize("base", ["exact", "nf4"])
def test_a_checkpoint_in_few_bits_is_no_model_path(saved: str, base: Any, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "few")
    config = tmp_path / "few" / "config.json"
    bits = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config.write_text(json.dumps(json.loads(config.read_text()) | bits))
    assert "its weights are quantised" in refusal(str(tmp_path / "few"), base)


@pytest.mark.parametrize("recipe", ["rl", "sft"])
def test_a_model_from_scratch_has_no_use_for_few_bits(recipe: str):
    data = {"data": {"kind": "file", "path": "rows.jsonl"}, "train": {"steps": 1, "lr": 1e-3}}
    environment = {
        "environment": {"name": "sort"},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 1, "group_size": 2},
    }
    raw = {
        "recipe": recipe,
        "model": {"preset": "tiny", "lora": {"base": "nf4"}},
        **(data if recipe == "sft" else environment),
    }
    with pytest.raises(
        SpecError, match=r"^model.lora.base = 'nf4': needs model.path; model.preset = 'tiny' has random"
    ):
        parse_spec(raw)
