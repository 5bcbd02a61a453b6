"""The trainer's tensors in the form in which they are served: all of them, cast, finite. Or nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.bridge.common.manifest import TensorEntry, dtype_named, listed, name_of
from tandem.errors import SyncError
from tandem.ops.finite_check import Finite
from tandem.types import Weights

_ADAPTED = ("base_model.model.", ".lora_")


class Form(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def forms(weights: Weights, replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    """What will be served, by name: of a model the engines have said it; of an adapter the trainer says it, and the
    engines, if they can, which layers there are and in which type adapters are kept: `adapter_dtype`."""
    layout = _agreed(replies, mode)
    if weights.kind != "adapter":
        return layout
    dtype = next((reply["adapter_dtype"] for reply in replies if "adapter_dtype" in reply), None)
    found = {name: Form(dtype or name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.tensors()}
    if layout and (odd := sorted(name for name in found if _layer_of(name) not in layout)):
        raise SyncError(
            f"{mode}: version {weights.version}: {listed(odd)} adapt no layer that the engine serves ({len(odd)} of "
            f"{len(found)} tensors); trainer and engine must load one base model"
        )
    return found


def outgoing(weights: Weights, into: Mapping[str, Form], mode: str) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once. The names are complete, and all values numbers, when it ends well; not before."""
    finite = Finite()
    for name, tensor in shaped(weights, into, mode):
        finite.add(name, tensor)
        yield name, tensor
    check_numbers(finite.odd(), weights, into, mode)


def check_numbers(odd: Sequence[str], weights: Weights, into: Mapping[str, Form | TensorEntry], mode: str) -> None:
    if odd:
        kind = dtype_named(into[odd[0]].dtype)
        raise SyncError(
            f"{mode}: version {weights.version}: '{odd[0]}' holds a value that is no number, or none that {kind} can "
            "hold"
        )


def shaped(weights: Weights, into: Mapping[str, Form], mode: str) -> Iterator[tuple[str, Tensor]]:
    """As `outgoing`, with values that nobody has looked at."""
    what = f"{mode}: version {weights.version}"
    missing, unknown = set(into), list[str]()
    with torch.no_grad():
        for name, tensor in weights.tensors():
            if name not in into:
                unknown.append(name)
            elif name not in missing:
                raise SyncError(f"{what}: the trainer named '{name}' twice")
            else:
                missing.discard(name)
                yield name, _served(name, tensor, into[name], what)
    if missing or unknown:
        raise SyncError(
            f"{what}: of {len(into)} tensors that the engine serves the trainer does not send {len(missing)} "
            f"({listed(sorted(missing))}), and it sends {len(unknown)} others ({listed(sorted(unknown))}); all are "
            "mapped, or none is sent: trainer and engine must load one model"
        )


def _agreed(replies: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Form]:
    if not replies:
        raise SyncError(f"{mode}: no engine is attached: nobody has said what it serves")
    layouts = [
        {name: Form(dtype, tuple(shape)) for name, (dtype, shape) in reply["layout"].items()} for reply in replies
    ]
    for reply, layout in zip(replies[1:], layouts[1:], strict=True):
        names = sorted(layout.keys() | layouts[0].keys())
        if odd := [name for name in names if layout.get(name) != layouts[0].get(name)]:
            one, other = layouts[0].get(odd[0]), layout.get(odd[0])
            raise SyncError(
                f"{mode}: engines {replies[0]['boot_id']} and {reply['boot_id']} do not serve the same: {listed(odd)}; "
                f"the first is {one} there and {other} here"
            )
    return layouts[0]


def _served(name: str, tensor: Tensor, form: Form, what: str) -> Tensor:
    if tuple(tensor.shape) != form.shape:
        raise SyncError(f"{what}: '{name}' is {list(tensor.shape)} and is served as {list(form.shape)}")
    dtype = dtype_named(form.dtype)
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise SyncError(f"{what}: '{name}' is {tensor.dtype} and is served as {dtype}: its values would be others")
    return tensor.detach().to(dtype)


def _layer_of(name: str) -> str:
    prefix, mark = _ADAPTED
    return f"{name.removeprefix(prefix).partition(mark)[0]}.weight" if name.startswith(prefix) else ""
