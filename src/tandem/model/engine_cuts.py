"""How the tensor-parallel workers of vLLM cut a model, for ranks that train in the workers' memory.

vLLM cuts q, k, v, gate, up, the embedding and the head by rows, and o and down by columns. Norms, and the biases of o
and down, are whole on every worker. Each worker says what it holds when it is attached, so a wrong guess is refused
there, too (bridge/shared).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tandem.errors import SpecError
from tandem.ops.parts import BY_COLUMNS, Cut
from tandem.spec.bridges import SHARED
from tandem.spec.engine_cuts import why_not_cut

_FIELD = f"sync.bridge = '{SHARED.name}'"
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


def engine_cuts(module: Any, ranks: int) -> dict[str, Cut]:
    """Return the cut of each parameter. SpecError, with the name, for what cannot be cut so."""
    config = module.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cuts: dict[str, Cut] = {}
    for path, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            cuts[f"{path}.{key}" if path else key] = _cut(path, part, key, parameter)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    lengths = {name: shape[cuts[name] == "cols"] for name, shape in shapes.items() if cuts[name] != "whole"}
    tables = {name for name in shapes if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    if why_not := why_not_cut(ranks, kv_heads, lengths, tables):
        raise SpecError(f"{_FIELD}: {why_not}")
    return {name: cuts[name] for name in shapes}


def _cut(path: str, part: Any, key: str, parameter: Any) -> Cut:
    last = path.rpartition(".")[2]
    if isinstance(part, nn.Embedding) or (isinstance(part, nn.Linear) and last in _BY_ROWS):
        return "rows"
    if isinstance(part, nn.Linear) and last in BY_COLUMNS:
        return "cols" if key == "weight" else "whole"
    if parameter.ndim > 1:
        what = "experts are" if "expert" in path else f"a {type(part).__name__} is"
        raise SpecError(
            f"{_FIELD}: '{path}.{key}': {what} not cut as vLLM's workers cut it, so ranks cannot train in the workers' "
            "memory; choose 'broadcast'"
        )
    return "whole"
