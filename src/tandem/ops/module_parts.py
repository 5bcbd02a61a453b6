"""Parts of a transformers module: its decoder layers, and its tables with one row a token."""

from __future__ import annotations

from typing import Any


def layers_of(module: Any, *, repeated: bool = False) -> list[Any]:
    """`repeated`: with a layer that is there in several places once for each."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    named = module.named_modules(remove_duplicate=not repeated)
    return [part for _, part in named if isinstance(part, GradientCheckpointingLayer)]


def tables_of(module: Any, head: Any) -> set[str]:
    """Return the names of parameters with one row a token: embeddings and the head."""
    from torch import nn

    named = module.named_modules(remove_duplicate=False)
    owners = {name for name, part in named if isinstance(part, nn.Embedding) or part is head}
    return {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in owners}
