"""An adapter is compared in its slot, where it is served, before a worker answers; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_launches import Copying
from tandem.ops.digest import fingerprints
from tandem.types import Weights
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.lora_slots import SCHEME, LoraSlots
from tandem.vllm_worker.served_memory import TensorLayout, TensorPiece
from tandem.vllm_worker.worker import EngineWorker

RANK, ROWS, COLS, MOST = 2, 5, 7, 4
A, B = "base_model.model.layer.q.lora_A.weight", "base_model.model.layer.q.lora_B.weight"


class Source:
    """An engine's end whose versions nobody has looked at."""

    def __init__(self) -> None:
        self.coming: list[Weights] = []
        self.looks = 0

    def receive(self, version: int, rank: int = 0) -> Weights:
        return self.coming.pop()

    def prefetch(self, rank: int = 0) -> None:
        self.looks += 1


class Engine:
    """One layer, two slots, and one worker whose slots they are."""

    def __init__(self, *, verify_adapters: bool = True, held: int = ROWS, name: str = "layer.q") -> None:
        """`held`: rows of the layer that this worker has, the first ones. `name`: of the layer."""
        layer = SimpleNamespace(
            lora_a_stacked=(torch.zeros(2, 1, MOST, COLS),), lora_b_stacked=(torch.zeros(2, 1, held, MOST),)
        )
        self.layer = layer
        self.in_slots: list[int | None] = [None, None]
        self.manager: Any = SimpleNamespace(
            lora_config=SimpleNamespace(
                fully_sharded_loras=False, max_loras=2, max_lora_rank=MOST, lora_dtype=torch.float32
            ),
            _adapter_manager=SimpleNamespace(modules={name: layer}, lora_index_to_id=self.in_slots),
            _load_adapter=None,
            remove_adapter=self._remove,
        )
        weight = f"{name}.weight"
        piece = TensorPiece(weight, weight, torch.zeros(held, COLS), 0, 0, (ROWS, COLS))
        self.slots = LoraSlots(self.manager, TensorLayout({weight: [piece]}, {}, (), {}), {}, CheckpointNames(None))
        self.slots.reuses_tensors = True
        self.source = Source()
        self.worker: Any = object.__new__(EngineWorker)
        vars(self.worker).update(
            _theirs=SimpleNamespace(device=torch.device("cpu")), _adapters=self.slots, _source=self.source
        )
        vars(self.worker).update(_incoming=None, _rank=0, _world=1, _version=-1, _verify_adapters=verify_adapters)

    def load(self, tensors: dict[str, Tensor], expected: dict[str, str], into: str = "") -> dict[str, Any]:
        weights = Weights(1, "adapter", lambda: iter(tensors.items()), {"r": RANK, "lora_alpha": RANK}, expected)
        self.source.coming.append(weights)
        return self.worker.load(1, into)

    def as_vllm_does(self, name: str) -> None:
        """Takes what was staged, and gives it the first slot that is free."""
        slot, staged = self.in_slots.index(None), self.slots._staged[SCHEME + name]
        self.in_slots[slot] = self.slots._ids[SCHEME + name] = slot + 1
        staged.is_theirs = True
        self.layer.lora_a_stacked[0][slot, 0, :RANK] = staged.tensors[A]
        self.layer.lora_b_stacked[0][slot, 0, :, :RANK] = staged.tensors[B][: self.layer.lora_b_stacked[0].shape[2]]

    def _remove(self, number: int) -> None:
        self.in_slots[self.in_slots.index(number)] = None


def an_adapter(seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    drawn = torch.Generator().manual_seed(seed)
    tensors = {A: torch.randn(RANK, COLS, generator=drawn), B: torch.randn(ROWS, RANK, generator=drawn)}
    return tensors, fingerprints(tensors)


def spoiled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One byte of it is another."""
    there = {name: tensor.clone() for name, tensor in tensors.items()}
    there[B].view(torch.uint8)[1, 2] ^= 1
    return there


def test_a_new_adapter_that_is_not_what_was_sent_is_refused_before_vllm_is_asked_for_it() -> None:
    engine = Engine()
    tensors, expected = an_adapter(1)
    with pytest.raises(SyncError, match=f"what arrived of '{B}' is not what was sent"):
        engine.load(spoiled(tensors), expected)
    assert engine.slots.names() == []
    answer = engine.load(tensors, expected)
    assert engine.slots.names() == [answer["adapter"]]


def test_a_layer_that_vllm_also_reads_without_its_adapter_takes_none() -> None:
    engine = Engine(name="layer.kv_b_proj")  # latent attention decodes with views of its weight
    tensors = {name.replace(".q.", ".kv_b_proj."): tensor for name, tensor in an_adapter(1)[0].items()}
    with pytest.raises(SyncError, match=r"'layer\.kv_b_proj' is no layer that this engine can adapt; name others in"):
        engine.load(tensors, fingerprints(tensors))


def test_a_refusal_names_the_layers_that_are_left() -> None:
    tensors = dict(an_adapter(1)[0])
    for other in (".gate_up_proj.", ".conv.in_proj."):
        tensors |= {name.replace(".q.", other): tensor for name, tensor in an_adapter(1)[0].items()}
    told = r"'layer\.conv\.in_proj' is no layer .* adapt \(2 such layers\); set model\.lora\.targets = \[\"q\"\]"
    with pytest.raises(SyncError, match=told):
        Engine().load(tensors, fingerprints(tensors))


def test_a_byte_that_changed_after_it_was_sent_is_found_in_the_slot_and_what_is_served_stays() -> None:
    engine = Engine()
    names: list[str] = []
    for seed in (1, 2):
        names.append(engine.load(*an_adapter(seed))["adapter"])
        engine.as_vllm_does(names[-1])
    old, served = names
    before = engine.slots.served_pieces(served)
    tensors, expected = an_adapter(3)
    with pytest.raises(SyncError, match=f"what arrived of '{B}' is not what was sent"):
        engine.load(spoiled(tensors), expected, old)
    assert engine.slots.served_pieces(served) == before
    assert engine.source.looks == 2  # after those that were taken
    answer = engine.load(tensors, expected, old)  # the slot may be written again
    assert (answer["adapter"], answer["loaded"]) == (old, True)
    assert dict(zip((A, B), digest.parted(answer["digests"]), strict=True)) == expected


def test_a_slot_that_was_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    name = engine.load(*an_adapter(1))["adapter"]
    engine.as_vllm_does(name)
    monkeypatch.setattr(Copying, "run", lambda _: None)
    with pytest.raises(SyncError, match="is not what was sent"):
        engine.load(*an_adapter(2), name)


def test_a_worker_that_holds_a_part_compares_what_it_holds_whole() -> None:
    """Of the rest the engine adds up what all of them say."""
    engine = Engine(held=3)
    tensors, expected = an_adapter(1)
    name = engine.load(tensors, expected)["adapter"]
    engine.as_vllm_does(name)
    digests = digest.texts(engine.slots.served_numbers(name))
    engine.slots.check_served(name, [digests[0], ""], expected)
    with pytest.raises(SyncError, match=f"'{A}' is not what was sent"):
        engine.slots.check_served(name, ["", ""], expected)
