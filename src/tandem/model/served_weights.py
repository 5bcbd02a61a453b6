"""List a trained module's weights as engines serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.quantized_base import exact, quantized_parts
from tandem.ops.batched_launches import Replay
from tandem.ops.named_tensors import live_tensors

_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_foreach_mul: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


def derived_names(module: Any) -> set[str]:
    """Return the names of weights that `whole` must compute: those under an adapter, and quantized ones."""
    few_bits = {id(part) for part in quantized_parts(module)}
    return {
        f"{name}.weight"
        for name, part in module.named_modules()
        if id(part) in few_bits or hasattr(type(part), "get_base_layer")
    }


@torch.no_grad()
def whole(module: Any, derived: Set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a plain checkpoint: adapters merged, quantized weights widened, one tensor at a time.
    `derived`: what `derived_names` returned for this module."""
    derived = derived_names(module) if derived is None else derived
    for name, tensor in live_tensors(module):
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            yield plain, exact(module, plain) if plain in derived or name in derived else tensor.detach()


def base(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the plain model under the adapters."""
    for name, tensor in live_tensors(module):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor.detach()


def base_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the same without buffers: the parameters themselves."""
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


class StableAdapter:
    """An adapter under PEFT's names: always the same tensor objects, with the values at the last call.

    B is already scaled, in float32, so that every engine computes with the same numbers. Creating hundreds of tensors
    for each version would take longer than moving their bytes, and every call of torch releases the interpreter and may
    wait to get it back. So the tensors are kept and updated by two calls, on a GPU by one.
    """

    def __init__(self, found: Sequence[Adapted]) -> None:
        """`found`: the result of `adapted`."""
        self._trained = [tensor for each in found for tensor in (each.a, each.b)]
        self._names = [name for each in found for name in (each.a_name, each.b_name)]
        self._scales = [each.scale for each in found]
        self._where: list[int] = []
        self._scaled: list[Tensor] = []
        self._served: list[tuple[str, Tensor]] = []
        self._scaling: Replay | None = None

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors with the present values. Tensors that were returned before get these values, too."""
        where = [tensor.data_ptr() for tensor in self._trained]
        if where != self._where:
            self._make()
            self._where = where
        if self._scaling is not None:
            self._scaling.run()
        return iter(self._served)

    def _scale(self) -> None:
        _foreach_copy(self._scaled, self._trained[1::2])
        _foreach_mul(self._scaled, self._scales)

    def _make(self) -> None:
        """Create the tensors; called again when the parameters have moved to other memory."""
        self._scaled = [torch.empty_like(tensor, dtype=torch.float32) for tensor in self._trained[1::2]]
        pairs = zip(self._trained[::2], self._scaled, strict=True)
        tensors = [tensor for a, scaled in pairs for tensor in (a.detach(), scaled)]
        self._served = list(zip(self._names, tensors, strict=True))
        if tensors:
            self._scaling = Replay(self._scale, {tensor.device for tensor in tensors}, "scalings of an adapter")


def adapter(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the adapter of a module once."""
    return StableAdapter(adapted(module)).tensors()


def adapted(module: Any) -> list[Adapted]:
    """Return the layers that have an adapter."""
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
    """Return the config that PEFT stores with these tensors. alpha = r, because B contains the scale."""
    config, names = adapted.peft_config["default"], adapted.targeted_module_names
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.r,
        "lora_alpha": config.r,
        "target_modules": sorted(
            target for target in config.target_modules if any(f".{name}".endswith(f".{target}") for name in names)
        ),
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": None,
    }
