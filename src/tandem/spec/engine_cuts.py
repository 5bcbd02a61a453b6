"""Whether the ranks of a trainer can hold what a tensor-parallel engine's workers hold: from sizes alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_PADDED_TO = 64
"""vLLM pads the rows of the embedding and of the head to a multiple of this before it cuts them."""
_ELSE = "choose 'broadcast', or another number of ranks and of engine.tensor_parallel"


def why_not_cut(ranks: int, kv_heads: int, lengths: Mapping[str, int], tables: Collection[str]) -> str:
    """Return why not, with the name of what stands in the way; empty if they can. `lengths`: of each tensor that is
    cut, its rows or columns. `tables`: those with a row for each token."""
    if kv_heads % ranks:
        return (
            f"the model has {kv_heads} heads of keys and values, which cannot be dealt evenly to {ranks} workers; "
            f"{_ELSE}"
        )
    for name, length in lengths.items():
        if length % ranks:
            return f"'{name}' has {length} rows or columns to cut, which {ranks} does not divide; {_ELSE}"
    if odd := next((name for name in lengths if name in tables and lengths[name] % _PADDED_TO), ""):
        return (
            f"'{odd}' has {lengths[odd]} rows, which vLLM pads to a multiple of {_PADDED_TO} before it cuts them, and "
            "ranks hold no padding; choose 'broadcast', or a vocabulary of such a size"
        )
    return ""
