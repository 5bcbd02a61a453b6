"""vLLM's CPU build with its weights unpacked, on stand-ins of the modules that Tandem changes there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.vllm_worker.unpacked_cpu_weights import keep_weights_plain, plain_linear

LAYERS = "vllm.model_executor.layers"
DELTA_NETS = f"{LAYERS}.mamba.ops.cpu.gdn_attention"


class Asked:
    """What vLLM's own functions were asked."""

    def __init__(self) -> None:
        self.packed: list[Any] = []
        self.convolved: list[tuple[str, tuple[int, ...], bool]] = []

    def dispatch_cpu_unquantized_gemm(self, layer: Any, remove_weight: bool) -> None:
        self.packed.append(layer)

    def kernel(self, name: str) -> Any:
        def computed(*, weight: Tensor, is_weight_packed: bool, x: Tensor) -> Tensor:
            self.convolved.append((name, tuple(weight.shape), is_weight_packed))
            return x

        return computed


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    utils = SimpleNamespace(dispatch_cpu_unquantized_gemm=asked.dispatch_cpu_unquantized_gemm)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    for name, module in {
        "vllm": ModuleType("vllm"), "vllm.platforms": platforms, "vllm.model_executor": ModuleType("executor"),
        LAYERS: SimpleNamespace(utils=utils), f"{LAYERS}.utils": utils,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def layer(*shape: int) -> Any:
    return SimpleNamespace(weight=torch.zeros(shape))


def told_to_pack(layer: Any) -> Any:
    sys.modules[f"{LAYERS}.utils"].dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


def test_a_delta_net_s_kernels_get_the_plain_weight_of_their_convolution(asked: Asked, monkeypatch: pytest.MonkeyPatch):
    names = ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu")
    kernels: Any = SimpleNamespace(**{name: asked.kernel(name) for name in names})
    monkeypatch.setitem(sys.modules, DELTA_NETS, kernels)
    keep_weights_plain()
    convolution = told_to_pack(layer(6, 1, 4))
    assert not asked.packed
    assert convolution.weight.shape == (6, 1, 4)
    for name in names:
        getattr(kernels, name)(weight=convolution.weight, is_weight_packed=True, x=torch.zeros(1))
    assert asked.convolved == [(name, (6, 4), False) for name in names]


@pytest.mark.parametrize("kernels", [None, SimpleNamespace(_causal_conv1d_fwd_cpu=print)])
def test_a_vllm_with_other_kernels_packs_the_convolution_which_is_refused_later(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, kernels: Any
):
    monkeypatch.setitem(sys.modules, DELTA_NETS, kernels)
    keep_weights_plain()
    assert asked.packed == [told_to_pack(layer(6, 1, 4))]
    assert told_to_pack(layer(6, 4)).cpu_linear is plain_linear
    assert len(asked.packed) == 1
