"""An adapter that was read into the engine's memory is copied and proven as one that lies anywhere."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import SyncError
from tandem.model.presets import make_model
from tandem.ops.digest import fingerprints, fingerprints_of_host
from tandem.ops.named_tensors import copied_to
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
RANK = 4


@pytest.fixture(scope="module")
def base() -> Any:
    return make_model("tiny", byte_tokenizer(), 0).eval()


def adapter(module: Any, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    tensors = dict[str, Tensor]()
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            owner = f"base_model.model.{path}"
            tensors[f"{owner}.lora_A.weight"] = torch.randn(RANK, layer.in_features) / 4
            tensors[f"{owner}.lora_B.weight"] = torch.randn(layer.out_features, RANK) / 8
    return tensors


def engine_of(module: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(module, num_ids=256, end_ids=frozenset(), decode=lambda ids: "", kv_gib=0.1)
    engine.version = 0
    return engine


def together(tensors: dict[str, Tensor], engine: EmbeddedEngine) -> dict[str, Tensor]:
    """Put the tensors side by side into memory of the engine."""
    whole, end, found = engine.host_memory(sum(each.nbytes for each in tensors.values())), 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        found[name] = whole[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return found


def test_copies_and_fingerprints_are_those_of_the_host(base: Any):
    device, tensors = torch.device("cuda", 0), adapter(base, 0)
    placed = together(tensors, engine_of(copy.deepcopy(base).cuda()))
    some = {name: placed[name] for name in [*placed][1:5]}  # they do not fill their memory
    for each in (tensors, placed, some, {"turned": torch.randn(5, 9).t()}):
        there = copied_to(device, each)
        assert {tensor.device for tensor in there.values()} == {device}
        assert all(torch.equal(there[name].cpu(), tensor) for name, tensor in each.items())
        assert fingerprints_of_host(each, device) == fingerprints(each)
    memories = {tensor.untyped_storage().data_ptr() for tensor in copied_to(device, placed).values()}
    assert len(memories) == 1


def test_it_answers_as_the_same_adapter_in_tensors_of_their_own(base: Any):
    async def play() -> None:
        engine, tensors = engine_of(copy.deepcopy(base).cuda()), adapter(base, 1)
        await engine.put_adapter("plain", tensors, {"r": RANK}, fingerprints(tensors))
        await engine.put_adapter("placed", together(tensors, engine), {"r": RANK})
        told = [await engine.generate([5, 6, 7], Sampling(12, seed=4), adapter=name) for name in ("plain", "placed")]
        assert told[0].ids == told[1].ids
        await engine.close()

    asyncio.run(play())


def test_a_byte_that_changes_after_the_fingerprints_were_taken_is_seen(base: Any):
    async def play() -> None:
        engine, tensors = engine_of(copy.deepcopy(base).cuda()), adapter(base, 2)
        placed = together(tensors, engine)
        expected = fingerprints_of_host(placed, torch.device("cuda", 0))
        last = [*placed][-1]
        placed[last].view(torch.int32)[-1, -1] ^= 1
        with pytest.raises(SyncError, match="is not what was sent"):
            await engine.put_adapter("odd", placed, {"r": RANK}, expected)
        await engine.close()

    asyncio.run(play())
