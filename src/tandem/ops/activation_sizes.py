"""What forward leaves for backward, per token and from the shape alone: of the layers as transformers computes them.

Counted by what autograd saves: a norm in fp32 and its output, queries and keys after the rotation, the four wide ones
of a gated MLP. A frozen weight saves no input; an adapter saves its own in fp32. A compiled layer saves what goes into
its products, into its norms and into its attention, and makes the rest again (counted from the allocator on a GPU).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.ops.byte_sizes import ModelShape


@dataclass(frozen=True, slots=True)
class Pass:
    """How a forward pass is done. `width` of a number; `rank` 0 trains every weight; `row` tokens in a masked row, 0
    where rows hold one sequence each, or are packed."""

    width: int
    rank: int = 0
    activations: str = "keep"
    row: int = 0
    compiled: bool = False


def layer_bytes(shape: ModelShape, how: Pass) -> float:
    """Of one token in one layer, all of it kept."""
    w, h, q, k, i = how.width, shape.hidden, shape.query, shape.key, shape.intermediate
    if how.compiled and not how.rank:
        heads = 4 * (shape.heads + (shape.heads + shape.kv_heads) * shape.qk_norm)
        if how.activations == "selective":
            return w * (2 * h + 3 * q + 3 * k + 2 * i) + heads + 8
        return w * (4 * h + 3 * q + 3 * k + 3 * i) + heads + 8
    norm = 4 + (0 if how.rank else w)  # in fp32, and what the trained weight was multiplied with
    found = 2.0 * (norm * h + 4)
    if shape.qk_norm:
        found += norm * (q + k) + 4 * (shape.heads + shape.kv_heads)
    keys = 2 * q if how.row and q != k else 2 * k  # under a mask, keys and values are repeated
    found += w * (q + keys) + w * q + 4 * shape.heads + w * how.row
    found += 3 * w * i
    if not how.rank:
        return found + 2 * w * h + w * i  # outputs of both norms; what goes into the last product
    inputs = 4 * (5 * h + q + i) if w != 4 else 4 * (2 * h + i)  # casts are shared where nothing is cast
    return found + inputs + 4 * how.rank * len(shape.linears)


def kept_bytes(shape: ModelShape, how: Pass) -> float:
    """Of one token in one layer, as much as stays until backward."""
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


def activation_bytes(shape: ModelShape, how: Pass, tokens: int) -> float:
    """Of a whole micro-batch, all of whose tokens are trained: layers, the last norm, and the rotation's tables."""
    w, h = how.width, shape.hidden
    last = (4 + (0 if how.rank else w)) * h + 4 + w * h + 4
    tables = 2 * w * shape.head_dim if how.activations in ("keep", "offload") else 0
    if how.rank and how.activations == "keep":
        last -= 4 * h + 4  # nothing before the first adapter has a gradient
    return tokens * (kept_bytes(shape, how) * shape.layers + last + tables + how.row)


def backward_bytes(shape: ModelShape, how: Pass, tokens: int) -> float:
    """Of one layer on its way through backward: what is computed again, and the gradients that exist at once."""
    if how.activations == "keep":  # most gradients take the place of what they were made from
        return tokens * how.width * shape.intermediate
    again = layer_bytes(shape, how) - kept_bytes(shape, how)
    return tokens * (again + how.width * (3 * shape.intermediate + 2 * shape.hidden))
