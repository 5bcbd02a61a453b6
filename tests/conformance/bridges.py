"""Every bridge, made alike; weights for it; and one version's way from end to end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.collective.control_channel import ChannelAddress, ControlChannel
from tandem.bridge.collective.sender import AdapterBroadcastBridge, BroadcastBridge
from tandem.bridge.common import packer
from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge, RestartBridge
from tandem.bridge.inproc import InprocBridge
from tandem.bridge.null import NullBridge
from tandem.protocols import WeightBridge, WeightSource
from tandem.types import Sent, WeightKind, Weights

Make = Callable[[Path, float], WeightBridge]
BUCKET_BYTES = 1024


def skeleton(at: Path) -> Path:
    """What a checkpoint has besides weights, and some of what it must not bring along."""
    model = at / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text(f'{{"of": "{name}"}}')
    for name in ("model.safetensors", "model.safetensors.index.json", "adapter_config.json", "README.md"):
        (model / name).write_text("of other weights")
    return model


COPYING: dict[str, Make] = {
    "disk": lambda at, s: DiskBridge(at / "versions", skeleton(at), buffers=["rotary"], deadline_s=s),
    "restart": lambda at, s: RestartBridge(at / "versions", skeleton(at), buffers=["rotary"], deadline_s=s),
    "adapter": lambda at, s: AdapterBridge(at / "adapters", deadline_s=s),
    "broadcast": lambda at, s: BroadcastBridge(bucket_bytes=BUCKET_BYTES, deadline_s=s),
    "adapter_broadcast": lambda at, s: AdapterBroadcastBridge(deadline_s=s),
    "broadcast by memory": lambda at, s: BroadcastBridge(bucket_bytes=BUCKET_BYTES, deadline_s=s, backend="ipc"),
    "adapter_broadcast by memory": lambda at, s: AdapterBroadcastBridge(deadline_s=s, backend="ipc"),
}
FILES = ("disk", "restart", "adapter")
LENT = ("broadcast by memory", "adapter_broadcast by memory")
FILLED = "adapter_broadcast by memory"
"""For one receiver it lies there before it is announced: until then nobody but the trainer has begun."""
COLLECTIVES = ("broadcast", "adapter_broadcast", *LENT)
BRIDGES: dict[str, Make] = {
    "inproc": lambda at, s: InprocBridge(s),
    "null": lambda at, s: NullBridge(),
    **COPYING,
}

ADAPTER_CONFIG = {"r": 4, "lora_alpha": 4, "target_modules": ["q"], "use_rslora": False}


def full_tensors(seed: int) -> dict[str, Tensor]:
    """Of every type and awkward shape; some are larger than a bucket."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        "q.weight": torch.randn(40, 33, generator=drawn),
        "turned": torch.randn(17, 65, generator=drawn).t(),
        "every other": torch.randn(9, 8, generator=drawn)[:, ::2],
        "half": torch.randn(31, generator=drawn).half(),
        "brain": torch.randn(5, 7, 3, generator=drawn).bfloat16(),
        "scalar": torch.randn((), generator=drawn),
        "empty": torch.zeros(0, 4),
        "count": torch.randint(-9, 9, (11,), generator=drawn),
        "flags": torch.randint(0, 2, (3,), generator=drawn).bool(),
        "rotary": torch.randn(6, generator=drawn),
    }


def adapter_tensors(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "base_model.model.q.lora_A.weight": torch.randn(4, 33, generator=drawn).bfloat16(),
        "base_model.model.q.lora_B.weight": torch.randn(4, 40, generator=drawn).t(),
    }


def tensors_for(kind: WeightKind, seed: int = 0) -> dict[str, Tensor]:
    return adapter_tensors(seed) if kind == "adapter" else full_tensors(seed)


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}


def reply(boot_id: str = "engine-1") -> dict[str, Any]:
    """An engine's: it serves `q.weight` in fewer bits than the trainer has."""
    layout = layout_of(full_tensors(0))
    layout["q.weight"][0] = "bfloat16"
    return {"boot_id": boot_id, "workers": 1, "layout": layout}


def weights_of(version: int, kind: WeightKind, tensors: Mapping[str, Tensor] | None = None) -> Weights:
    there = tensors_for(kind, version) if tensors is None else tensors
    return Weights(version, kind, lambda: iter(there.items()), adapter=ADAPTER_CONFIG if kind == "adapter" else {})


def as_served(kind: WeightKind, version: int) -> dict[str, Tensor]:
    tensors = tensors_for(kind, version)
    if kind == "full":
        tensors["q.weight"] = tensors["q.weight"].bfloat16()
    return tensors


def bits(tensors: Iterator[tuple[str, Tensor]] | Mapping[str, Tensor]) -> dict[str, str]:
    """Type, shape and a hash of the bytes, without any code of the bridges."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    found: dict[str, str] = {}
    for name, tensor in items:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    return found


PASSES = {"disk": 1, "restart": 1, "adapter": 1, "broadcast": 2}
"""How often a bridge asks for the tensors. The last time they move."""


def while_sending(weights: Weights, name: str, change: Callable[[int, str, Tensor], Tensor]) -> Weights:
    """What the trainer says changes between looking and sending."""
    mode = name.partition(" ")[0]
    if mode == "adapter_broadcast":  # it keeps what it has looked at
        return _while_packing(weights, change)
    of_them = PASSES[mode]
    passes = iter(range(of_them))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        last = next(passes) == of_them - 1
        for number, (name, tensor) in enumerate(weights.tensors()):
            yield name, change(number, name, tensor) if last else tensor

    return replace(weights, tensors=tensors)


def _while_packing(weights: Weights, change: Callable[[int, str, Tensor], Tensor]) -> Weights:
    plain = packer.AdapterTensors.hand_over

    def hand_over(self: Any, *args: Any) -> None:
        packer.AdapterTensors.hand_over = plain
        for number, (name, tensor) in enumerate(self._flat):
            tensor.copy_(change(number, name, tensor.clone()))
        plain(self, *args)

    packer.AdapterTensors.hand_over = hand_over
    return weights


def struck_while_sending(weights: Weights, name: str, strike: Callable[[], object]) -> Weights:
    def change(number: int, name: str, tensor: Tensor) -> Tensor:
        if number == 1:
            time.sleep(0.2)  # the other end has begun as well
            strike()
        return tensor

    return while_sending(weights, name, change)


def channel_of(link: Mapping[str, Any]) -> ControlChannel:
    """As any process with this link may open it."""
    address = ChannelAddress.from_link(link)
    return ControlChannel(address, address.connect(), mine=False)


def meet(bridge: WeightBridge, num_receivers: int = 1) -> WeightSource:
    source = bridge.source(num_receivers)
    source.attached(reply())
    return source


def carry(
    bridge: WeightBridge, source: WeightSource, weights: Weights, ranks: tuple[int, ...] = (0,)
) -> tuple[Sent, list[Weights]]:
    """Both ends at once, as publishing does it. The sender's error comes first, if both have one."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        answers = [threads.submit(source.receive, weights.version, rank) for rank in ranks]
        return bridge.send(weights), [answer.result(timeout=30) for answer in answers]
