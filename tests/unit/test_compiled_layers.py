"""What a compiled layer takes and keeps, counted on a CPU: the compiler splits forward and backward alike for a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.model import forward
from tandem.model.lora import add_lora
from tandem.ops.activation_sizes import Pass, layer_bytes
from tandem.ops.byte_sizes import ModelShape
from tandem.ops.module_parts import layers_of
from tandem.spec.model import LoraSpec

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler warns of its own code
HIDDEN, WIDE, HEADS, KV, DIM, LAYERS, RANK, TOKENS = 256, 768, 16, 4, 32, 2, 8, 256


class Recorded:
    """A backend of `torch.compile` without generated code, which notes the numbers that a graph takes."""

    def __init__(self) -> None:
        self.numbers: list[str] = []

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        placed = [node for node in graph.graph.nodes if node.op == "placeholder"]
        given = zip(placed, inputs, strict=True)
        self.numbers += [node.name for node, value in given if isinstance(value, Tensor) and value.ndim == 0]
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)


def layers_with_adapters() -> list[Any]:
    config = Qwen3Config(
        vocab_size=300, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=DIM, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    module: Any = Qwen3ForCausalLM(config).bfloat16().requires_grad_(False)
    add_lora(module, LoraSpec(rank=RANK))
    forward._compile(module.eval())
    return layers_of(module)


def run(layers: list[Any]) -> Tensor:
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    cos = torch.ones(1, TOKENS, DIM, dtype=torch.bfloat16)
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=(cos, cos), use_cache=False, spans=())
    return hidden


@pytest.mark.parametrize("activations", ["keep", "selective"])
def test_a_compiled_layer_with_adapters(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    backend = Recorded()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    budget = forward._SELECTIVE if activations == "selective" else 1.0
    with forward.functorch.patch(activation_memory_budget=budget), torch._dynamo.config.patch(specialize_float=False):
        layers = layers_with_adapters()
        run(layers).float().sum().backward()
    assert backend.numbers == []  # each would be computed on the CPU, by what a C++ compiler makes of it

    weights = {each.data_ptr() for layer in layers for each in layer.parameters()}
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        rotary = saved.numel() == TOKENS * DIM and saved.dtype == torch.bfloat16
        if saved.data_ptr() not in weights and not rotary:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        hidden = run(layers)
    shape = ModelShape(300, HIDDEN, WIDE, LAYERS, HEADS, KV, DIM, tied=False, qk_norm=True)
    counted = layer_bytes(shape, Pass(2, rank=RANK, activations=activations, compiled=True))
    assert sum(kept.values()) / TOKENS / LAYERS == pytest.approx(counted, rel=0.01)
    assert hidden.requires_grad
