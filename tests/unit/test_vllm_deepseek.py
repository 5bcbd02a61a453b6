"""DeepSeek-V3 as vLLM serves it: latent attention, whose parts are views of one weight, and a bias of the routing.

The layers here stand in for vLLM's own.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from tandem.errors import SyncError
from tandem.ops.named_tensors import views_of_others
from tandem.vllm_worker import served_memory
from tandem.vllm_worker.served_memory import ServedMemory, layout_of

LATENT, HEADS, KEY, VALUE = 6, 2, 3, 4
CONFIG = DeepseekV3Config(
    num_hidden_layers=1, scoring_func="sigmoid", qk_rope_head_dim=8, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
)  # fmt: skip


class UnquantizedLinearMethod: ...


class _Linear(nn.Module):
    def __init__(self, inputs: int, *outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sum(outputs), inputs))
        self.quant_method, self.tp_rank, self.tp_size = UnquantizedLinearMethod(), 0, 1
        self.output_sizes, self.output_size, self.output_size_per_partition = outputs, sum(outputs), sum(outputs)


class DeepSeekV2FusedQkvAProjLinear(_Linear):
    __module__ = "vllm.deepseek"


class ColumnParallelLinear(_Linear):
    __module__ = "vllm.linear"


class GateLinear(_Linear):
    __module__ = "vllm.gate"

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.e_score_correction_bias = nn.Parameter(torch.randn(3))


class RoutedExperts(nn.Module):
    __module__ = "vllm.experts"

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.w13_weight, self.w2_weight = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 4, 3))
        self.e_score_correction_bias = bias
        self.quant_method = UnquantizedFusedMoEMethod()
        self.activation = SimpleNamespace(value="silu")
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=1, use_ep=False))


class UnquantizedFusedMoEMethod:
    unquantized_backend, moe_kernel = SimpleNamespace(name="TRITON"), None


class MLAAttention(nn.Module):
    __module__ = "vllm.mla"

    def __init__(self, kv_b_proj: _Linear) -> None:
        super().__init__()
        self.kv_b_proj, self.kv_lora_rank, self.num_heads = kv_b_proj, LATENT, HEADS
        self.qk_nope_head_dim, self.v_head_dim = KEY, VALUE
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.process_weights_after_loading()

    def process_weights_after_loading(self) -> None:
        """As vLLM's."""
        weight = self.kv_b_proj.weight.to(torch.float32).T.view(LATENT, HEADS, KEY + VALUE)
        keys, values = weight.split([KEY, VALUE], dim=-1)
        self.W_UV = nn.Parameter(values.transpose(0, 1), requires_grad=False)
        self.W_UK_T = nn.Parameter(keys.permute(1, 2, 0), requires_grad=False)


class DeepseekScalingRotaryEmbedding(nn.Module):
    __module__ = "vllm.rotary"

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scaling_factor = 10000.0, 4.0
        self.mscale = (0.1 * math.log(4.0) + 1.0) / (0.05 * math.log(4.0) + 1.0)
        angles = torch.outer(torch.arange(64.0), self._compute_inv_freq(self.scaling_factor))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1) * self.mscale)

    def _compute_inv_freq(self, scaling_factor: float) -> torch.Tensor:
        return DeepseekV3RotaryEmbedding(CONFIG).inv_freq


class DeepseekV3ForCausalLM(nn.Module):
    packed_modules_mapping = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}  # noqa: RUF012 - as vLLM's

    def __init__(self, config: Any = CONFIG) -> None:
        super().__init__()
        self.config = config


def served(kind: type[nn.Module] = DeepseekV3ForCausalLM) -> Any:
    made: Any = kind()
    attention: Any = nn.Module()
    attention.fused_qkv_a_proj = DeepSeekV2FusedQkvAProjLinear(4, 5, LATENT + 8)
    attention.kv_b_proj = ColumnParallelLinear(LATENT, HEADS * (KEY + VALUE))
    attention.rotary_emb = DeepseekScalingRotaryEmbedding()
    attention.mla_attn = nn.Module()  # vLLM's wrapper, which has the layers once more
    attention.mla_attn.kv_b_proj = attention.kv_b_proj
    attention.mla_attn.mla_attn = MLAAttention(attention.kv_b_proj)
    layer: Any = nn.Module()
    layer.self_attn, layer.mlp = attention, nn.Module()
    layer.mlp.gate, layer.mlp.experts = GateLinear(), nn.Module()
    layer.mlp.experts.routed_experts = RoutedExperts(layer.mlp.gate.e_score_correction_bias)
    made.model = nn.Module()
    made.model.layers = nn.ModuleList([layer])
    return made


def latent(made: Any) -> Any:
    return made.model.layers[0].self_attn.mla_attn.mla_attn


def test_parts_that_vllm_derives_follow_the_weight_that_is_written():
    made = served()
    layout, attention = layout_of(made), latent(made)
    of_layer = {
        "self_attn.q_a_proj.weight": [5, 4],
        "self_attn.kv_a_proj_with_mqa.weight": [LATENT + 8, 4],
        "self_attn.kv_b_proj.weight": [HEADS * (KEY + VALUE), LATENT],
        "mlp.gate.weight": [3, 4],
        "mlp.gate.e_score_correction_bias": [3],
        "mlp.experts.gate_up_proj": [3, 6, 4],
        "mlp.experts.down_proj": [3, 4, 3],
    }
    forms = {f"model.layers.0.{name}": shape for name, shape in of_layer.items()}
    tables = dict.fromkeys(
        ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"), DeepseekV3RotaryEmbedding(CONFIG).inv_freq
    )
    assert {name: form[1] for name, form in layout.forms().items()} == {
        **forms,
        **{name: list(tensor.shape) for name, tensor in tables.items()},
    }
    sent = {name: torch.randn(shape) for name, shape in forms.items()} | tables
    served_memory.check(layout, sent)
    served_memory.write(layout, sent, served_memory.moves(layout, sent))
    derived = attention.W_UK_T.clone(), attention.W_UV.clone()
    attention.process_weights_after_loading()
    assert torch.equal(attention.W_UK_T, derived[0])
    assert torch.equal(attention.W_UV, derived[1])
    assert torch.equal(attention.kv_b_proj.weight, sent["model.layers.0.self_attn.kv_b_proj.weight"])
    ServedMemory(layout).check_derived()


@pytest.mark.parametrize("part", ["W_UV", "W_UK_T"])
def test_a_derived_part_that_is_a_copy_is_refused(part: str):
    made = served()
    setattr(latent(made), part, nn.Parameter(getattr(latent(made), part).detach().clone(), requires_grad=False))
    with pytest.raises(SyncError, match=r"mla_attn\.kv_b_proj\.weight' itself but with a copy"):
        layout_of(made)
    made = served()
    delattr(latent(made), part)  # as vLLM does for a CPU with AMX
    with pytest.raises(SyncError, match=r"mla_attn\.kv_b_proj\.weight' itself but with a copy"):
        layout_of(made)


def test_a_third_derived_part_is_refused():
    made = served()
    latent(made).W_UK_T_dcp_qrep = nn.Parameter(torch.zeros(2))
    with pytest.raises(SyncError, match=r"W_UK_T_dcp_qrep' 0 of 2 elements are known"):
        layout_of(made)


def test_latent_attention_of_a_model_that_is_not_known_is_refused():
    class OtherForCausalLM(DeepseekV3ForCausalLM): ...

    with pytest.raises(SyncError, match="is latent attention, which is not known of OtherForCausalLM"):
        layout_of(served(OtherForCausalLM))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = softmax"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"rope_parameters": {**CONFIG.rope_parameters, "attention_factor": 1.0}}, r"attention_factor = 1\.0"),
    ],
)
def test_settings_with_which_vllm_computes_otherwise_are_refused(change: dict[str, Any], said: str):
    layout_of(DeepseekV3ForCausalLM())
    changed = DeepseekV3Config(**{**CONFIG.to_dict(), **change})
    with pytest.raises(SyncError, match=rf"{said} in the model's config\.json; trainer and vLLM compute the same"):
        layout_of(DeepseekV3ForCausalLM(changed))
    silent = SimpleNamespace(rope_parameters={}, num_hidden_layers=1)
    with pytest.raises(SyncError, match="scoring_func = softmax"):  # what vLLM takes an absent one for
        layout_of(DeepseekV3ForCausalLM(silent))


def test_views_of_others_are_found_and_neighbours_in_one_storage_are_not():
    whole = torch.arange(24.0)
    matrix = whole[:12].view(3, 4)
    tensors = {
        "part": matrix.T[1:],
        "matrix": matrix,
        "neighbour": whole[12:20],
        "crossing": whole[10:14],
        "alone": torch.zeros(3),
        "empty": whole[:0],
    }
    found = views_of_others(tensors)
    assert found == {"part": ("matrix", 1)}
    home = matrix.clone()
    owner, offset = found["part"]
    assert owner == "matrix"
    part = tensors["part"]
    assert torch.equal(home.as_strided(part.shape, part.stride(), offset), part)
