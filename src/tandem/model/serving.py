"""A trained module's weights as an engine is to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.quantized import exact, quantized_parts
from tandem.ops.tensors import live_tensors

_foreach_mul: Any = torch._foreach_mul  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def whole(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of a checkpoint of the plain model. Adapters are merged and few bits widened, one tensor at a time."""
    few_bits = {id(part) for part in quantized_parts(module)}
    changed = {
        f"{name}.weight"
        for name, part in module.named_modules()
        if id(part) in few_bits or hasattr(type(part), "get_base_layer")
    }
    for name, tensor in live_tensors(module):
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            yield plain, exact(module, plain) if plain in changed or name in changed else tensor.detach()


def base(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain model under the adapters."""
    for name, tensor in live_tensors(module):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor.detach()


def base_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The same without buffers: the parameters themselves."""
    for name, tensor in module.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


class Adapted(NamedTuple):
    """A layer's adapter, as PEFT keeps it."""

    a_name: str
    b_name: str
    a: Tensor
    b: Tensor
    scale: float


@torch.no_grad()
def adapter(module: Any, found: Sequence[Adapted] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Under PEFT's names. B is scaled already, so that every engine computes with the very same numbers. `found`: what
    `adapted` has; to look for it takes as long as to move the adapter."""
    found = adapted(module) if found is None else found
    wide = [each.b if each.b.dtype == torch.float32 else each.b.float() for each in found]
    scaled = _foreach_mul(wide, [each.scale for each in found]) if found else ()
    for each, b in zip(found, scaled, strict=True):
        yield each.a_name, each.a.detach()
        yield each.b_name, b


def adapted(module: Any) -> list[Adapted]:
    """The layers that an adapter was put on."""
    return [
        Adapted(
            f"base_model.model.{name}.lora_A.weight",
            f"base_model.model.{name}.lora_B.weight",
            part.lora_A["default"].weight,
            part.lora_B["default"].weight,
            float(part.scaling["default"]),
        )
        for name, part in module.named_modules()
        if "lora_A" in part._modules
    ]


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
