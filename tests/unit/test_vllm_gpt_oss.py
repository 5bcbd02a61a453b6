"""gpt-oss as vLLM serves it: experts that lie transposed, sinks, a rotary table with a factor, and fixed settings.

The layers here stand in for vLLM's own. The experts' arithmetic is compared with transformers'.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRotaryEmbedding

from tandem.bridge.shared.memory import Segment
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.vllm_worker import served_memory
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.served_memory import ServedMemory, layout_of
from tandem.vllm_worker.unpacked_cpu_weights import plain_experts

CONFIG = GptOssConfig(
    num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2, hidden_size=4, intermediate_size=5, head_dim=8,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=9,
    rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 16, "rope_theta": 150000.0,
    },
)  # fmt: skip


class UnquantizedFusedMoEMethod(nn.Module):
    __module__ = "vllm.method"

    def __init__(self, biases: tuple[Any, Any]) -> None:
        super().__init__()
        self.unquantized_backend, self.moe_kernel = SimpleNamespace(name="TRITON"), None
        self.moe_quant_config = SimpleNamespace(w1_bias=biases[0], w2_bias=biases[1])

    def process_weights_after_loading(self) -> None: ...


class GptOssRoutedExperts(nn.Module):
    __module__ = "vllm.gpt_oss"

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight, self.w13_bias = nn.Parameter(torch.randn(3, 10, 4)), nn.Parameter(torch.randn(3, 10))
        self.w2_weight, self.w2_bias = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 4))
        self.quant_method = UnquantizedFusedMoEMethod((self.w13_bias, self.w2_bias))
        self.activation = SimpleNamespace(value="swigluoai")
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=1, use_ep=False))


class OAIAttention(nn.Module):
    __module__ = "vllm.gpt_oss"

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 2
        self.sinks = nn.Parameter(torch.randn(2))
        self.attn: Any = nn.Module()
        self.attn.impl = SimpleNamespace(sinks=self.sinks)


class YaRNScalingRotaryEmbedding(nn.Module):
    __module__ = "vllm.rotary"

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scaling_factor = 150000.0, 4.0
        self.mscale = 0.1 * math.log(4.0) + 1.0
        angles = torch.outer(torch.arange(64.0), self._compute_inv_freq(self.scaling_factor))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1) * self.mscale)

    def _compute_inv_freq(self, scaling_factor: float) -> torch.Tensor:
        assert scaling_factor == 4.0  # not the base
        return GptOssRotaryEmbedding(CONFIG).inv_freq


class GptOssForCausalLM(nn.Module):
    hf_to_vllm_mapper = SimpleNamespace(orig_to_new_substr={".self_attn.": ".attn."})

    def __init__(self, config: Any = CONFIG) -> None:
        super().__init__()
        self.config = config


def served() -> Any:
    made: Any = GptOssForCausalLM()
    layer: Any = nn.Module()
    layer.attn = OAIAttention()
    layer.attn.rotary_emb = YaRNScalingRotaryEmbedding()
    layer.mlp = nn.Module()
    layer.mlp.experts = nn.Module()
    layer.mlp.experts.routed_experts = GptOssRoutedExperts()
    made.model = nn.Module()
    made.model.layers = nn.ModuleList([layer])
    return made


def test_a_version_is_written_transposed_and_proven_as_it_was_sent():
    made = served()
    layout = layout_of(made)
    of_layer = {
        "self_attn.sinks": [2],
        "mlp.experts.gate_up_proj": [3, 4, 10],
        "mlp.experts.gate_up_proj_bias": [3, 10],
        "mlp.experts.down_proj": [3, 5, 4],
        "mlp.experts.down_proj_bias": [3, 4],
    }
    tables = {"model.rotary_emb.inv_freq": [4], "model.rotary_emb.original_inv_freq": [4]}
    expected = {f"model.layers.0.{name}": shape for name, shape in of_layer.items()}
    assert {name: form[1] for name, form in layout.forms().items()} == {**expected, **tables}
    frequencies = GptOssRotaryEmbedding(CONFIG).inv_freq
    sent = {name: torch.randn(shape) for name, shape in expected.items()} | dict.fromkeys(tables, frequencies)
    memory = ServedMemory(layout)
    served_memory.check(layout, sent)
    served_memory.write(layout, sent, served_memory.moves(layout, sent))
    experts = made.model.layers[0].mlp.experts.routed_experts
    assert torch.equal(experts.w13_weight, sent["model.layers.0.mlp.experts.gate_up_proj"].transpose(1, 2))
    assert torch.equal(experts.w2_bias, sent["model.layers.0.mlp.experts.down_proj_bias"])
    shapes = {name: list(tensor.shape) for name, tensor in sent.items()}
    fingerprints = digest.fingerprints(sent)
    assert {name for name, *_ in memory.pieces()} == sent.keys()
    served_memory.check_served(memory.pieces(), fingerprints, shapes)
    experts.w13_weight.data.copy_(experts.w13_weight.data.flip(1))
    with pytest.raises(SyncError, match=r"gate_up_proj' is served as"):
        served_memory.check_served(memory.pieces(), fingerprints, shapes)


def test_a_trainer_can_map_transposed_memory_and_train_in_it():
    layout = layout_of(served())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (piece,) = layout.pieces[name]
    owner = Segment.create("0" * 32, {"param": piece.view.transpose(1, 2)})
    owner.tensors["param"].copy_(piece.view.transpose(1, 2))
    owner.lend({name: owner.tensors["param"].transpose(1, 2)})
    theirs = Segment.open(owner.handle)
    assert torch.equal(theirs.tensors[name], piece.view)
    assert owner.place(owner.tensors[name]) == theirs.place(theirs.tensors[name])
    theirs.tensors[name][1, 2, 3] = 7.0
    assert owner.tensors[name][1, 2, 3] == 7.0
    owner.close()


@pytest.mark.parametrize("place", ["attn.sinks", "mlp.experts.routed_experts.w13_bias"])
def test_a_kernel_with_a_copy_of_its_own_is_refused(place: str):
    made = served()
    layer = made.model.layers[0]
    if place == "attn.sinks":
        layer.attn.attn.impl.sinks = layer.attn.sinks.detach().clone()
    else:
        config = layer.mlp.experts.routed_experts.quant_method.moe_quant_config
        config.w1_bias = config.w1_bias.detach().clone()
    with pytest.raises(SyncError, match=rf"does not compute with 'model\.layers\.0\.{place}' itself"):
        layout_of(made)


def test_sinks_of_a_type_that_kernels_convert_are_refused():
    made = served()
    made.model.layers[0].attn.sinks.data = made.model.layers[0].attn.sinks.data.half()
    with pytest.raises(SyncError, match=r"'model\.layers\.0\.attn\.sinks' is torch\.float16"):
        layout_of(made)


def test_sinks_and_experts_that_are_cut_between_workers_are_refused():
    made = served()
    made.model.layers[0].attn.num_attention_heads = 4
    with pytest.raises(SyncError, match=r"attention sinks are cut between 2 workers"):
        layout_of(made)


def test_a_rotary_factor_that_is_not_the_trainers_is_refused():
    made = served()
    assert math.isclose(made.model.layers[0].attn.rotary_emb.mscale, GptOssRotaryEmbedding(CONFIG).attention_scaling)
    told = {**CONFIG.rope_parameters, "attention_factor": 1.5}
    made.config = SimpleNamespace(num_hidden_layers=2, rope_parameters=told)
    with pytest.raises(SyncError, match=r"multiplies by 1\.13863, and a trainer by 1\.5: this vLLM does not read"):
        layout_of(made)
    for more in ({"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 2.0}, {"factor": 0.5}):
        told = {**CONFIG.rope_parameters, **more}
        trainers = GptOssRotaryEmbedding(GptOssConfig(**{**CONFIG.to_dict(), "rope_parameters": told}))
        made.config = SimpleNamespace(num_hidden_layers=2, rope_parameters=told)
        made.model.layers[0].attn.rotary_emb = YaRNScalingRotaryEmbedding()
        rotary = made.model.layers[0].attn.rotary_emb
        rotary.cos_sin_cache *= trainers.attention_scaling / rotary.mscale
        rotary.mscale = trainers.attention_scaling
        layout_of(made)


def test_a_rotary_table_with_another_factor_is_refused():
    made = served()
    made.model.layers[0].attn.rotary_emb.cos_sin_cache /= 1.1
    with pytest.raises(SyncError, match=r"rotary: the table of .* away from what its frequencies give"):
        layout_of(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swiglu_limit", 9.0),
        ("swiglu_alpha", 1.5),
        ("rms_norm_eps", 1e-6),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_settings_that_vllm_does_not_read_are_refused_unless_they_are_its_own(name: str, value: Any):
    layout_of(GptOssForCausalLM())
    with pytest.raises(SyncError, match=rf"{name} = .* in the model's config\.json; trainer and vLLM compute the same"):
        layout_of(GptOssForCausalLM(GptOssConfig(**{**CONFIG.to_dict(), name: value})))


def test_names_are_the_trainers():
    names = CheckpointNames(GptOssForCausalLM())
    for ours, theirs in (
        ("model.layers.1.attn.qkv_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.embedding.weight", "model.embed_tokens.weight"),
        ("model.layers.1.mlp.router.bias", "model.layers.1.mlp.router.bias"),
    ):
        assert (names.original(ours), names.served(theirs)) == (theirs, ours)


def test_experts_on_a_cpu_compute_as_transformers():
    torch.manual_seed(0)
    theirs = GptOssExperts(CONFIG)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 3)  # so that some values are clamped
    tokens = torch.randn(6, 4)
    chosen, shares = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [1, 2]]), torch.rand(6, 2)
    w1, w2 = theirs.gate_up_proj.data.transpose(1, 2), theirs.down_proj.data.transpose(1, 2)
    biases = SimpleNamespace(w1_bias=theirs.gate_up_proj_bias.data, w2_bias=theirs.down_proj_bias.data)
    output, kind = torch.full((6, 4), torch.nan), SimpleNamespace(value="swigluoai")
    plain_experts(biases, output, tokens, w1, w2, shares, chosen, kind, apply_router_weight_on_input=False)
    expected = theirs(tokens, chosen, shares)
    assert torch.allclose(output, expected, rtol=1e-5, atol=1e-4)
