"""Which layers of a model in vLLM are refused; the layers here stand in for vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.vllm_worker import served_memory
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.served_memory import ServedMemory, TensorLayout, layout_of
from tandem.vllm_worker.unpacked_cpu_weights import plain_experts


class Attention(torch.nn.Module):
    __module__ = "vllm.attention.layer"

    def __init__(self) -> None:
        super().__init__()
        for name in ("_q_scale", "_k_scale"):
            self.register_buffer(name, torch.tensor(1.0))


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Attention(), Attention())


def test_attention_with_a_scale_is_refused_with_its_value():
    made = model()
    assert set(layout_of(made).scales) == {"0._q_scale", "0._k_scale", "1._q_scale", "1._k_scale"}
    made.get_buffer("1._k_scale").fill_(0.25)
    with pytest.raises(SyncError, match=r"'1\._k_scale' is 0\.25, not 1"):
        layout_of(made)


def test_a_scale_that_is_written_into_later_is_seen():
    made = model()
    served = ServedMemory(layout_of(made))
    served.check_derived()
    made.get_buffer("0._q_scale").fill_(0.5)
    with pytest.raises(SyncError, match=r"'0\._q_scale' is not what this engine derived"):
        served.check_derived()


# --- mixtures of experts


class UnquantizedFusedMoEMethod(nn.Module):
    __module__ = "vllm.method"

    def __init__(self, kernels: str) -> None:
        super().__init__()
        self.unquantized_backend, self.moe_kernel = SimpleNamespace(name=kernels), None

    def process_weights_after_loading(self) -> None: ...


class RoutedExperts(nn.Module):
    __module__ = "vllm.experts"

    def __init__(self, kernels: str = "TRITON", workers: int = 1) -> None:
        super().__init__()
        self.w13_weight, self.w2_weight = nn.Parameter(torch.randn(2, 6, 4)), nn.Parameter(torch.randn(2, 4, 3))
        self.quant_method: Any = UnquantizedFusedMoEMethod(kernels)
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=workers, use_ep=False))
        self.activation = SimpleNamespace(value="silu")


def with_experts(**options: Any) -> nn.Module:
    made = nn.Module()
    made.experts = nn.Module()
    made.experts.routed_experts = RoutedExperts(**options)
    return made


def test_experts_are_served_from_two_stacks_and_are_written_there():
    made = with_experts()
    layout = layout_of(made)
    assert {name: form[1] for name, form in layout.forms().items()} == {
        "experts.gate_up_proj": [2, 6, 4],
        "experts.down_proj": [2, 4, 3],
    }
    arrived = {name: torch.randn(shape) for name, (_, shape) in layout.forms().items()}
    served_memory.check(layout, arrived)
    served_memory.write(layout, arrived, served_memory.moves(layout, arrived))
    experts: Any = made.experts
    assert torch.equal(experts.routed_experts.w13_weight, arrived["experts.gate_up_proj"])
    assert torch.equal(experts.routed_experts.w2_weight, arrived["experts.down_proj"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "FLASHINFER_CUTLASS"}, "served by FLASHINFER_CUTLASS, which reorders weights in a way not known"),
        ({"kernels": "CPU"}, "served by CPU, which reorders"),
        ({"workers": 2}, "experts are cut between 2 workers, in a way not known; set engine.tensor_parallel = 1"),
    ],
)
def test_experts_that_lie_otherwise_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(SyncError, match=said):
        layout_of(with_experts(**options))


def test_experts_that_compute_otherwise_are_refused():
    made: Any = with_experts()
    made.experts.routed_experts.activation.value = "swigluoai"
    with pytest.raises(SyncError, match="computes swigluoai, which is not known of this model"):
        layout_of(made)


def test_quantised_experts_are_refused():
    made = with_experts()
    experts: Any = made.experts
    del experts.routed_experts.quant_method
    experts.routed_experts.quant_method = SimpleNamespace()
    with pytest.raises(SyncError, match="only unquantised weights are known"):
        layout_of(made)


@pytest.mark.parametrize("scaled_before", [False, True])
def test_experts_one_after_the_other_give_the_sum_over_a_token_s_experts(scaled_before: bool):
    tokens, w1, w2 = torch.randn(5, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 3)
    chosen, shares = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]]), torch.rand(5, 2)
    expected = torch.zeros(5, 4)
    for token, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = (w1[expert] @ tokens[token]).chunk(2)
            expected[token] += (1.0 if scaled_before else weight) * (w2[expert] @ (nn.functional.silu(gate) * up))
    output = torch.full((5, 4), torch.nan)
    silu = SimpleNamespace(value="silu")
    plain_experts(None, output, tokens, w1, w2, shares, chosen, silu, apply_router_weight_on_input=scaled_before)
    assert torch.allclose(output, expected, atol=1e-5)


# --- what both compute from the configuration


class Gemma2Model(nn.Module):
    __module__ = "vllm.gemma2"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("normalizer", torch.tensor(8.0))


class RotaryEmbedding(nn.Module):
    __module__ = "vllm.rotary"

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        angles = torch.outer(torch.arange(16.0), self._compute_inv_freq(base))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1))

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1.0 / base ** (torch.arange(0, 8, 2) / 8)


def test_gemma_s_scale_of_embeddings_must_be_the_trainer_s():
    made = nn.Module()
    made.model = Gemma2Model()
    layout = layout_of(made)
    assert layout.forms() == {"model.embed_tokens.embed_scale": ("float32", [])}
    served_memory.check(layout, {"model.embed_tokens.embed_scale": torch.tensor(8.0)})
    with pytest.raises(SyncError, match=r"'model\.embed_tokens\.embed_scale' is not this engine's"):
        served_memory.check(layout, {"model.embed_tokens.embed_scale": torch.tensor(8.1)})
    served = ServedMemory(layout)
    made.get_buffer("model.normalizer").fill_(9.0)
    with pytest.raises(SyncError, match=r"'model\.normalizer' is not what this engine derived"):
        served.check_derived()


def test_a_scale_that_is_served_rounded_is_proven_as_it_was_sent():
    made = nn.Module()
    made.model = Gemma2Model()
    made.model.normalizer = torch.tensor(640**0.5, dtype=torch.bfloat16)
    layout, name = layout_of(made), "model.embed_tokens.embed_scale"
    sent = {name: torch.tensor(640**0.5)}
    served = ServedMemory(layout)
    served_memory.check(layout, sent)
    served_memory.write(layout, sent, served_memory.moves(layout, sent))
    expected = {name: digest.text(digest.piece(sent[name], name))}
    served_memory.check_served(served.pieces(), expected, {name: []})
    with pytest.raises(SyncError, match=r"is served as \S+ and was sent as"):
        served_memory.check_served(served.pieces(), {name: digest.text(1)}, {name: []})


def test_a_constant_that_is_not_known_is_refused():
    made = nn.Module()
    made.model = Gemma2Model()
    made.model.register_buffer("odd", torch.zeros(1))
    with pytest.raises(SyncError, match=r"the buffer 'model\.odd' is not known"):
        layout_of(made)


def by_kind(local: float, far: float) -> tuple[nn.Module, TensorLayout]:
    made = nn.Module()
    made.config = SimpleNamespace(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {}, "full_attention": {}},
    )  # fmt: skip
    made.layers = nn.ModuleList()
    for base in (local, far):
        layer = nn.Module()
        layer.rotary_emb = RotaryEmbedding(base)
        made.layers.append(layer)
    outer = nn.Module()
    outer.model, outer.config = made, made.config
    return outer, layout_of(outer)


def test_each_kind_of_layers_has_the_rotary_table_of_its_name():
    _, layout = by_kind(1e2, 1e4)
    tables = layout.tables()
    for kind, base in (("sliding_attention", 1e2), ("full_attention", 1e4)):
        assert torch.equal(tables[f"model.rotary_emb.{kind}_inv_freq"], RotaryEmbedding(base)._compute_inv_freq(base))
    swapped = {
        name: tables[name.replace("sliding", "X").replace("full", "sliding").replace("X", "full")] for name in tables
    }
    with pytest.raises(SyncError, match="different rotary settings"):
        served_memory.check(layout, swapped)


# --- names


def test_names_in_which_classes_of_vllm_differ_are_those_of_the_trainer():
    def rules(name: str, **told: Any) -> CheckpointNames:
        return CheckpointNames(type(name, (), {"hf_to_vllm_mapper": SimpleNamespace(**told)})())

    mixtral = rules("MixtralForCausalLM", orig_to_new_substr={".gate_proj.": ".w1."})
    name, served = "model.layers.1.mlp.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"
    assert (mixtral.original(served), mixtral.served(name)) == (name, served)
    gemma = rules("Gemma4ForCausalLM", orig_to_new_prefix={"model.language_model.": "model."})
    again = gemma.original("model.self_decoder.decoder_layers.0.mlp.up_proj.weight")
    assert again == gemma.original("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    rules("CohereForCausalLM", orig_to_new_substr={"_quantizer.": None})  # drops what this model does not have
    with pytest.raises(SyncError, match=r"BambaForCausalLM names its weights otherwise .* \(by substr\)"):
        rules("BambaForCausalLM", orig_to_new_substr={"A_log": "A"})
