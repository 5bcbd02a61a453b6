"""What the trainer packs for each version of an adapter: found out once, as long as nothing is another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem.bridge.common import packer
from tandem.bridge.common.packer import Flat, Packing
from tandem.errors import SyncError
from tandem.model import served_weights
from tandem.ops.phase_timer import Phases
from tandem.types import Weights

LAYERS = [f"layers.{number}.q" for number in range(40)]
LAYOUT = {f"{layer}.weight": ["bfloat16", [6, 6]] for layer in LAYERS}


def adapted() -> list[served_weights.Adapted]:
    return [
        served_weights.Adapted(
            f"base_model.model.{layer}.lora_A.weight",
            f"base_model.model.{layer}.lora_B.weight",
            torch.randn(2, 6),
            torch.randn(6, 2).bfloat16(),
            0.3,
        )
        for layer in LAYERS
    ]


class Calls(TorchFunctionMode):
    """Of torch, but for those that let go of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ not in ("data_ptr", "_set_grad_enabled"):
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_another_version_of_an_adapter_is_packed_by_a_handful_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lets go of the interpreter, and a busy event loop gives it back 5 ms later: of 160 tensors no call each."""
    found = adapted()
    standing = served_weights.StableAdapter(found)
    packing = Packing("adapter_broadcast", [{"layout": LAYOUT, "adapter_dtype": "bfloat16", "boot_id": "one"}])

    def packed() -> Any:
        return packing.pack(Weights(1, "adapter", standing.tensors), Phases())

    packed()
    for each in found:
        each.a.add_(1)
        each.b.mul_(3)
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr(Flat, "checked_fingerprints", lambda _: ({}, []))
        packed()
    assert len(calls.names) < 6, calls.names
    there = packed()._flat.tensors
    for each in found:
        assert torch.equal(there[each.a_name], each.a.bfloat16())
        assert torch.equal(there[each.b_name], (each.b.float() * 0.3).bfloat16())


def test_what_was_found_out_is_found_out_again_when_tensors_names_or_engines_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    forms = packer.forms

    def counted(*args: Any) -> Any:
        looked.append(1)
        return forms(*args)

    monkeypatch.setattr("tandem.bridge.common.packer.forms", counted)
    replies: list[dict[str, Any]] = [{"layout": LAYOUT, "boot_id": "one"}]
    packing = Packing("adapter_broadcast", replies)
    tensors = dict(served_weights.StableAdapter(adapted()).tensors())

    def pack(named: dict[str, Tensor]) -> Any:
        return packing.pack(Weights(1, "adapter", lambda: iter(named.items())), Phases())

    first = pack(tensors)
    assert (pack(tensors).places is first.places, len(looked)) == (True, 1)
    (name, tensor), *_ = tensors.items()
    assert pack({**tensors, name: tensor.clone()}).places is first.places
    assert len(looked) == 2
    turned = dict(zip(tensors, [*list(tensors.values())[2:], *list(tensors.values())[:2]], strict=True))
    for each in (tensors, turned, tensors):
        pack(each)
    assert len(looked) == 5
    renamed = {name.replace("layers.0.", "layers.x."): tensor for name, tensor in tensors.items()}
    with pytest.raises(SyncError, match="adapt no layer that the engine serves"):
        pack(renamed)
    pack(tensors)
    replies.append({"layout": LAYOUT, "adapter_dtype": "float16", "boot_id": "two"})
    assert {entry.dtype for entry in pack(tensors).places.tensors.values()} == {"float16"}
