"""Compute the size of activations from a model's shape: what a forward pass keeps for the backward pass, per token.

The numbers follow what autograd saves in transformers' layers: a norm's fp32 input and its output, queries and keys
after the rotation, the wide activations of a gated MLP. A frozen weight saves no input; an adapter saves its input in
fp32. A compiled layer saves the inputs of its products, norms and attention, and recomputes the rest (measured with the
allocator on a GPU, and by what autograd saves in tests/unit/test_compiled_layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.ops.byte_sizes import ModelShape
from tandem.ops.counted_shape import CountedShape, LayerCount, Shape
from tandem.spec.model import LoraSpec


@dataclass(frozen=True, slots=True)
class Pass:
    """How a forward pass is done. `width`: bytes per number. `rank`: of adapters; 0: every weight is trained. `row`:
    tokens in a masked row; 0: rows have one sequence each, or are packed."""

    width: int
    rank: int = 0
    activations: str = "keep"
    row: int = 0
    compiled: bool = False
    lora: LoraSpec | None = None
    """The adapters of `rank`, where a pass is counted."""


def layer_bytes(shape: ModelShape, how: Pass) -> float:
    """Return the bytes of one token in one layer if everything is kept."""
    w, h, q, k, i = how.width, shape.hidden, shape.query, shape.key, shape.intermediate
    if how.compiled:
        heads = 4 * (shape.heads + (shape.heads + shape.kv_heads) * shape.qk_norm)
        adapters = 4 * how.rank * len(shape.linears)
        least = w * (2 * h + 3 * q + 3 * k + 2 * i) + heads + 8 + adapters
        if how.activations == "selective":
            return least
        return least + (4 * (2 * h + q + i) if how.rank else w * (2 * h + i))
    norm = 4 + (0 if how.rank else w)  # the fp32 input, and the factor of the trained weight
    found = 2.0 * (norm * h + 4)
    if shape.qk_norm:
        found += norm * (q + k) + 4 * (shape.heads + shape.kv_heads)
    keys = 2 * q if how.row and q != k else 2 * k  # under a mask, keys and values are repeated
    found += w * (q + keys) + w * q + 4 * shape.heads + w * how.row
    found += 3 * w * i
    if not how.rank:
        return found + 2 * w * h + w * i  # outputs of both norms; input of the last product
    inputs = 4 * (5 * h + q + i) if w != 4 else 4 * (2 * h + i)  # without casts, layers share their inputs
    return found + inputs + 4 * how.rank * len(shape.linears)


def kept_bytes(shape: ModelShape, how: Pass) -> float:
    """Return the bytes of one token in one layer that stay until the backward pass."""
    w, h, q, k, i = how.width, shape.hidden, shape.query, shape.key, shape.intermediate
    if how.activations == "recompute":
        return w * h
    if how.activations == "offload":
        return 0.0
    if how.activations == "selective" and not how.compiled:
        products = q + 2 * k + h + 2 * i + h
        adapters = 4 * how.rank * len(shape.linears) + 4 * products if how.rank else 0
        return w * h + w * products + w * q + 4 * shape.heads + adapters
    return layer_bytes(shape, how)


def layers_bytes(shape: Shape, how: Pass, tokens: float) -> float:
    """Return the bytes of all layers if everything is kept."""
    if isinstance(shape, CountedShape):
        return sum(_counted(layer, how, tokens) for layer in shape.count(how.width, how.lora).layers)
    return layer_bytes(shape, how) * shape.layers * tokens


def _counted(layer: LayerCount, how: Pass, tokens: float) -> float:
    """Return the bytes of a counted layer if everything is kept."""
    if how.compiled:
        kept = layer.compiled_least if how.activations == "selective" else layer.compiled
        return kept.bytes(tokens, how.row)
    masked = layer.repeated.bytes(tokens, how.row) + tokens * how.width * how.row if how.row and layer.attends else 0.0
    return layer.saved.bytes(tokens, how.row) + masked


def _counted_kept(layer: LayerCount, hidden: int, how: Pass, tokens: float) -> float:
    """Return the bytes of a counted layer that stay until the backward pass."""
    if how.activations == "recompute":
        return tokens * how.width * hidden
    if how.activations == "offload":
        return 0.0
    if how.activations == "selective" and not how.compiled:
        return tokens * how.width * hidden + layer.products.bytes(tokens, how.row)
    return _counted(layer, how, tokens)


def activation_bytes(shape: Shape, how: Pass, tokens: int) -> float:
    """Return the bytes of a micro-batch whose tokens are all trained: layers, last norm, rotary tables."""
    if isinstance(shape, CountedShape):
        count = shape.count(how.width, how.lora)
        kept = sum(_counted_kept(layer, shape.hidden, how, tokens) for layer in count.layers)
        return kept + count.root.saved.bytes(tokens, how.row) + tokens * how.row
    w, h = how.width, shape.hidden
    last = (4 + (0 if how.rank else w)) * h + 4 + w * h + 4
    tables = 2 * w * shape.head_dim if how.activations in ("keep", "offload") else 0
    if how.rank and how.activations == "keep":
        last -= 4 * h + 4  # nothing before the first adapter has a gradient
    return tokens * (kept_bytes(shape, how) * shape.layers + last + tables + how.row)


def backward_bytes(shape: Shape, how: Pass, tokens: int) -> float:
    """Return the extra bytes of one layer in the backward pass: recomputed activations, and gradients that exist at
    once."""
    if isinstance(shape, CountedShape):
        layers = shape.count(how.width, how.lora).layers
        widest = max(layer.widest.bytes(tokens, how.row) for layer in layers)
        if how.activations == "keep":
            return widest
        again = [_counted(each, how, tokens) - _counted_kept(each, shape.hidden, how, tokens) for each in layers]
        return max(again) + 3 * widest + 2 * tokens * how.width * shape.hidden
    if how.activations == "keep":  # most gradients reuse the memory of activations
        return tokens * how.width * shape.intermediate
    again = layer_bytes(shape, how) - kept_bytes(shape, how)
    return tokens * (again + how.width * (3 * shape.intermediate + 2 * shape.hidden))
