"""Load a frozen base in 8 or 4 bits (bitsandbytes), on which adapters are trained.

bitsandbytes stores the weights. Tandem computes the products itself, in the same way for trainer and engine: with
bitsandbytes' own products a token's result depends on its batch (outliers of 8 bits), or the weights are repacked at
the first product without a gradient and have no gradient from then on (4 bits on a CPU with AVX-512 BF16).

Shapes: O output features, I input features.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.io.gguf.directory import model_directory
from tandem.model.load_checkpoint import load_whole, refuse_images, refuse_unfit, supported_attention
from tandem.model.lora import quiet_bitsandbytes


def load_quantized(
    path: str, revision: str, attention: str, *, base: Literal["int8", "nf4"], dtype: torch.dtype, device: torch.device
) -> Any:
    """Load the linear layers in 8 or 4 bits, the head and everything else in `dtype`, directly onto `device`."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    refuse_missing_package(base)
    quiet_bitsandbytes()
    path = model_directory(path)
    config = refuse_unfit(path, revision)
    refuse_images(config, path, "model.path", "set model.lora.base = 'exact'")
    attention = supported_attention(config, attention)
    bits = (
        BitsAndBytesConfig(load_in_8bit=True)
        if base == "int8"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    )
    module = load_whole(
        AutoModelForCausalLM, path, "model.path", revision=revision, attn_implementation=attention,
        dtype=dtype, quantization_config=bits, device_map={"": device},
    )  # fmt: skip
    parts = quantized_parts(module)
    if not parts:
        raise SpecError(
            f"model.lora.base = '{base}': {type(module).__name__} has no linear layer that bitsandbytes supports; "
            "set model.lora.base = 'exact'"
        )
    for part in parts:
        part.forward = MethodType(_forward, part)
    return module


def refuse_missing_package(base: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise SpecError(
            f"model.lora.base = '{base}': bitsandbytes is not installed; pip install 'tandem-rl[quantized]', or set "
            "model.lora.base = 'exact'"
        )


def quantized_parts(module: Any) -> list[Any]:
    # Only a part's own weight: an adapter's layer also returns that of its inner layer.
    return [part for part in module.modules() if type(part._parameters.get("weight")).__name__ in _KINDS]


def share(module: Any) -> float:
    """Return the share of the model's parameters that are quantised."""
    few = sum(part.in_features * part.out_features for part in quantized_parts(module))
    exact = sum(tensor.numel() for tensor in module.parameters() if type(tensor).__name__ not in _KINDS)
    return few / (few + exact)


def exact_weight(part: Any, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight of a layer, `[O, I]`."""
    weight = part.weight
    if type(weight).__name__ == "Int8Params":
        return (weight.data * (weight.SCB / 127)[:, None]).to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state).to(dtype)


_KINDS = ("Int8Params", "Params4bit")


def _forward(part: Any, inputs: Tensor) -> Tensor:
    out = _Product.apply(inputs, part)
    return out if part.bias is None else out + part.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """A layer's product. Dequantised weights exist for one layer at a time; the backward pass computes them again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, part: Any) -> Tensor:
        ctx.part = part
        return inputs @ exact_weight(part, inputs.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient @ exact_weight(ctx.part, gradient.dtype), None


@torch.no_grad()
def merged(module: Any) -> Any:
    """Return a plain model on the CPU that is equal to `module` with its adapter merged, in the type of its other
    weights.

    It has the dequantised weights, not the original ones, because the adapter was trained on the dequantised ones.
    """
    config = copy.deepcopy(module.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = type(module)(config)
    tied = dict(plain.named_parameters(remove_duplicate=False)).keys() - dict(plain.named_parameters()).keys()
    state = {name: exact(module, name).cpu() for name in plain.state_dict() if name not in tied}
    plain.load_state_dict(state, strict=False, assign=True)
    for name, _ in list(plain.named_buffers()):
        if name not in state:  # a rotary table, which checkpoints lack
            owner, _, leaf = name.rpartition(".")
            plain.get_submodule(owner)._buffers[leaf] = exact(module, name).cpu()
    plain.tie_weights()
    plain.generation_config = module.generation_config
    return plain


def exact(module: Any, name: str) -> Tensor:
    """Return a plain model's tensor of this name, computed from a quantised module with adapters."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    base = part.get_base_layer() if hasattr(part, "get_base_layer") else part
    tensor: Tensor = getattr(base, leaf)
    if leaf == "weight" and quantized_parts(base):
        tensor = exact_weight(base, torch.float32)
    if leaf == "weight" and base is not part:
        tensor = tensor.float() + part.get_delta_weight("default")
    return tensor.to(module.config.dtype if leaf == "weight" else tensor.dtype)
