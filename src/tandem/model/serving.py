"""A trained module's weights as an engine is to serve them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.model.quantized import exact, quantized_parts
from tandem.ops.tensors import live_tensors

_ADAPTED = ".lora_A.default.weight"


@torch.no_grad()
def whole(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of a checkpoint of the plain model. Adapters are merged and few bits widened, one tensor at a time."""
    changed = {f"{name}.weight" for name, part in module.named_modules() if hasattr(part, "get_base_layer")}
    changed |= {f"{name}.weight" for name, part in module.named_modules() if quantized_parts(part) == [part]}
    for name, tensor in live_tensors(module):
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            yield plain, exact(module, plain) if plain in changed or name in changed else tensor.detach()


def base(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain model under the adapters."""
    for name, tensor in live_tensors(module):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor.detach()


@torch.no_grad()
def adapter(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Under PEFT's names. B is scaled already, so that every engine computes with the very same numbers."""
    for name, tensor in module.named_parameters():
        if name.endswith(_ADAPTED):
            owner = name.removesuffix(_ADAPTED)
            part = module.get_submodule(owner)
            scaled = part.lora_B["default"].weight.float() * part.scaling["default"]
            yield f"base_model.model.{owner}.lora_A.weight", tensor.detach()
            yield f"base_model.model.{owner}.lora_B.weight", scaled


def adapter_config(adapted: Any) -> dict[str, Any]:
    """What PEFT writes beside such tensors. alpha = r: the scale is in B."""
    config = adapted.peft_config["default"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.r,
        "lora_alpha": config.r,
        "target_modules": sorted(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": None,
    }
