"""Layers with a state, of a model in vLLM; the layers here stand in for vLLM's own."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.vllm_worker import served_memory, worker
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.served_memory import ServedMemory, TensorLayout, layout_of
from tandem.vllm_worker.unpacked_cpu_weights import COPY_OF_PACKED

HEADS, STATE, INNER = 4, 3, 6


class UnquantizedLinearMethod:
    pass


class MergedColumnParallelLinear(nn.Module):
    __module__ = "vllm.linear"

    def __init__(self, cols: int, sizes: list[int], workers: int = 1) -> None:
        super().__init__()
        self.output_sizes, self.tp_size, self.tp_rank = sizes, workers, 0
        self.quant_method = UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.randn(sum(sizes) // workers, cols))


class MambaMixer2(nn.Module):
    __module__ = "vllm.mamba"

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.conv1d = MergedColumnParallelLinear(4, [INNER, STATE, STATE], workers)
        self.conv1d.weight.data = self.conv1d.weight.data.unsqueeze(1)
        self.register_buffer("conv_weights", self.conv1d.weight.data.squeeze(1))
        self.in_proj = MergedColumnParallelLinear(5, [INNER, INNER, STATE, STATE, HEADS], workers)
        self.A = nn.Parameter(-torch.rand(HEADS) - 0.5)
        self.D, self.dt_bias = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(HEADS))


class MambaMixer(nn.Module):
    __module__ = "vllm.mamba"

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = MergedColumnParallelLinear(4, [INNER])
        self.A, self.D = nn.Parameter(-torch.rand(INNER, STATE) - 0.5), nn.Parameter(torch.randn(INNER))


class ShortConv(nn.Module):
    __module__ = "vllm.short_conv"

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.conv = MergedColumnParallelLinear(3, [8], workers)
        self.conv.weight.data = self.conv.weight.data.unsqueeze(1)


class FalconH1SSMDecoderLayer(nn.Module):
    __module__ = "vllm.falcon_h1"

    def __init__(self) -> None:
        super().__init__()
        self.mamba = MambaMixer2()
        self.register_buffer("mup_vector", torch.rand(1, 2 * INNER + 2 * STATE + HEADS))


class QwenGatedDeltaNetAttention(nn.Module):
    __module__ = "vllm.gdn"

    def __init__(self, served_in: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.tp_size = 1
        self.dt_bias = nn.Parameter(torch.randn(HEADS).to(served_in))
        self.A_log = nn.Parameter(torch.randn(HEADS))


def layered(layer: nn.Module) -> tuple[Any, TensorLayout]:
    made = nn.Module()
    made.mamba = layer
    return made, layout_of(made)


def arriving(layout: TensorLayout) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(getattr(torch, dtype)) for name, (dtype, shape) in layout.forms().items()}


def written(layout: TensorLayout, arrived: dict[str, Tensor]) -> None:
    served_memory.check(layout, arrived)
    served_memory.write(layout, arrived, served_memory.moves(layout, arrived))


@pytest.mark.parametrize("layer", [MambaMixer2, MambaMixer])
def test_a_mamba_layer_decays_as_the_version_that_was_written_says(layer: type[nn.Module]):
    made, layout = layered(layer())
    served, arrived = ServedMemory(layout), arriving(layout)
    memory = made.mamba.A.data_ptr()
    written(layout, arrived)
    assert torch.equal(made.mamba.A.data, -arrived["mamba.A_log"].exp())
    assert made.mamba.A.data_ptr() == memory  # captured graphs point there
    assert torch.equal(made.mamba.conv1d.weight, arrived["mamba.conv1d.weight"])
    assert torch.equal(made.mamba.D, arrived["mamba.D"])
    shapes = {name: shape for name, (_, shape) in layout.forms().items()}
    expected = {name: digest.text(digest.piece(tensor, name)) for name, tensor in arrived.items()}
    served_memory.check_served(pieces := served.pieces(), expected, shapes)
    assert {name for name, *_ in pieces} == arrived.keys()
    with pytest.raises(SyncError, match=r"'mamba\.A_log' is served as \S+ and was sent as"):
        served_memory.check_served(pieces, {"mamba.A_log": digest.text(1)}, shapes)


@pytest.mark.parametrize("layer", [MambaMixer2().bfloat16(), QwenGatedDeltaNetAttention()])
def test_a_trainer_of_16_bits_sends_16_and_the_engine_keeps_the_decay_in_32(layer: nn.Module):
    if isinstance(layer, MambaMixer2):
        layer.A.data = layer.A.data.float()
        layer.conv_weights = layer.conv1d.weight.data.squeeze(1)
    made, layout = layered(layer)
    served, arrived = ServedMemory(layout), arriving(layout)
    log = arrived["mamba.A_log"]
    assert log.dtype == torch.bfloat16
    assert layout.of_other_form() == ["mamba.A_log"]
    written(layout, arrived)
    kept, right = (made.mamba.A, -log.float().exp()) if hasattr(layer, "A") else (made.mamba.A_log, log.float())
    assert kept.dtype == torch.float32
    assert torch.equal(kept.data, right)
    shapes = {name: shape for name, (_, shape) in layout.forms().items()}
    expected = {name: digest.text(digest.piece(tensor, name)) for name, tensor in arrived.items()}
    served_memory.check_served(served.pieces(), expected, shapes)
    kept.data[0] *= 1.001
    with pytest.raises(SyncError, match=r"is not what this engine derived"):
        served.check_derived()


def test_a_delta_net_whose_types_agree_is_served_as_it_is_trained():
    assert layered(QwenGatedDeltaNetAttention(torch.float32))[1].of_other_form() == []


def test_a_decay_that_changes_after_it_was_written_is_seen():
    made, layout = layered(MambaMixer2())
    served = ServedMemory(layout)
    written(layout, arriving(layout))
    served.check_derived()
    made.mamba.A.data[1] *= 1.001
    with pytest.raises(SyncError, match=r"'mamba\.A' is not what this engine derived"):
        served.pieces()


def test_a_decay_that_is_not_finite_is_refused_before_anything_is_written():
    made, layout = layered(MambaMixer2())
    before = made.mamba.D.detach().clone()
    arrived = {**arriving(layout), "mamba.A_log": torch.tensor([0.0, 100.0, 0.0, 0.0])}
    with pytest.raises(SyncError, match=r"'mamba\.A_log' is too large"):
        written(layout, arrived)
    assert torch.equal(made.mamba.D, before)


def test_a_trainer_learns_which_tensors_are_served_in_another_form():
    assert layered(MambaMixer2())[1].of_other_form() == ["mamba.A_log"]
    assert layered(ShortConv())[1].of_other_form() == []


@pytest.mark.parametrize(
    ("bridge", "carries", "said"),
    [
        ("shared", "live", r"shared: 'mamba\.A_log' is served in another form .*; set sync\.bridge = 'disk'"),
        ("adapter", "adapter", r"adapters: 'mamba\.A_log' is served in another form .*; train all weights"),
    ],
)
def test_a_bridge_that_cannot_bring_or_compare_a_decay_is_refused(
    bridge: str, carries: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    made, _ = layered(MambaMixer2())
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
    theirs = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace()),
        device=torch.device("cpu"), rank=0, model_runner=SimpleNamespace(), get_model=lambda: made,
    )  # fmt: skip
    closed: list[str] = []
    source = SimpleNamespace(carries=carries, close=lambda: closed.append(bridge))
    monkeypatch.setattr(worker, "open_source", lambda link, device: source)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    with pytest.raises(SyncError, match=said):
        worker.EngineWorker(theirs).attach({"mode": bridge})
    assert closed == [bridge]


@pytest.mark.parametrize(("layer", "what"), [(MambaMixer2, "a Mamba layer is"), (ShortConv, "a short convolution is")])
def test_a_layer_with_a_state_that_is_cut_between_workers_is_refused(layer: Any, what: str):
    with pytest.raises(
        SyncError, match=f"'mamba': {what} cut between 2 workers, in a way not known; set engine.tensor"
    ):
        layered(layer(workers=2))


def test_a_convolution_that_is_computed_from_a_copy_is_refused():
    layer = MambaMixer2()
    layer.conv_weights = layer.conv1d.weight.data.squeeze(1).clone()
    with pytest.raises(SyncError, match="'mamba' computes with a copy of its convolution"):
        layered(layer)


def test_a_convolution_that_is_packed_is_refused():
    layer: Any = MambaMixer2()
    setattr(layer.conv1d, COPY_OF_PACKED, layer.conv1d.weight.data.squeeze(1).clone())
    layer.conv1d.weight.data = layer.conv1d.weight.data.clone()
    layer.conv_weights = layer.conv1d.weight.data.squeeze(1)
    with pytest.raises(SyncError, match=r"the convolution 'mamba\.conv1d' is packed for this CPU's bfloat16"):
        layered(layer)


def test_a_short_convolution_is_written_as_it_is_in_the_checkpoint():
    made, layout = layered(ShortConv())
    arrived = arriving(layout)
    written(layout, arrived)
    assert list(arrived) == ["mamba.conv.weight"]
    assert torch.equal(made.mamba.conv.weight, arrived["mamba.conv.weight"])


def test_falcon_s_scales_of_a_projection_must_be_the_trainer_s():
    made, layout = layered(FalconH1SSMDecoderLayer())
    name = "mamba.mamba.mup_vector"
    arrived = {**arriving(layout), name: made.mamba.mup_vector[None].clone()}
    written(layout, arrived)
    with pytest.raises(SyncError, match="is not this engine's"):
        written(layout, {**arrived, name: arrived[name] * 1.01})


@pytest.mark.parametrize(
    ("model", "rule", "served", "name"),
    [
        ("Lfm2", {".conv.": ".short_conv."}, "layers.0.short_conv.conv.weight", "layers.0.conv.conv.weight"),
        ("Lfm2", {".conv.": ".short_conv."}, "layers.0.short_conv.in_proj.weight", "layers.0.conv.in_proj.weight"),
        ("FalconH1", {"mamba": "mamba.mamba"}, "layers.0.mamba.mamba.D", "layers.0.mamba.D"),
        ("GraniteMoeHybrid", {}, "layers.0.block_sparse_moe.gate.weight", "layers.0.block_sparse_moe.router.weight"),
        ("Jamba", {".self_attn.": "."}, "layers.1.q_proj.weight", "layers.1.self_attn.q_proj.weight"),
        ("Jamba", {".self_attn.": "."}, "layers.1.mamba.x_proj.weight", "layers.1.mamba.x_proj.weight"),
    ],
)  # fmt: skip
def test_names_of_models_with_such_layers_are_those_of_the_trainer(
    model: str, rule: dict[str, str], served: str, name: str
):
    kind = type(f"{model}ForCausalLM", (), {"hf_to_vllm_mapper": SimpleNamespace(orig_to_new_substr=rule)})
    names = CheckpointNames(kind())
    assert (names.original(served), names.served(name)) == (name, served)
