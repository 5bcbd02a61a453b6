"""Adapters in PEFT's format are read into memory that the engine gives, and refused if they are damaged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.build import served_adapters
from tandem.build.served_adapters import read_adapter
from tandem.errors import RunError
from tandem.ops.digest import fingerprints
from tandem.recipes.adapter_table import AdapterTable

NAMES: tuple[str, ...] = ("layer.lora_A.weight", "layer.lora_B.weight")


def written(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = dict(zip(NAMES, (torch.randn(3, 5).to(dtype), torch.randn(7, 3).to(dtype)), strict=True))
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 4}))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b_is_scaled_and_all_is_float32(dtype: torch.dtype, tmp_path: Path):
    a, b = written(tmp_path, dtype).values()
    read = read_adapter(tmp_path)
    assert read.config == {"r": 3}
    assert read.tensors.keys() == {*NAMES}
    assert torch.equal(read.tensors[NAMES[0]], a.float())
    assert torch.equal(read.tensors[NAMES[1]], b.float() * (4 / 3))


def test_what_was_read_lies_in_the_memory_that_was_given(tmp_path: Path):
    given: list[torch.Tensor] = []

    def memory(num_bytes: int) -> torch.Tensor:
        given.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return given[-1]

    a, b = written(tmp_path, torch.float32).values()
    read = read_adapter(tmp_path, memory)
    (whole,) = given
    assert whole.nbytes == a.nbytes + b.nbytes
    expected = read_adapter(tmp_path).tensors
    for name, tensor in read.tensors.items():
        assert tensor.untyped_storage().data_ptr() == whole.data_ptr()
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("group_bytes", [1, 400, 2**20])
def test_tensors_are_looked_at_as_they_are_returned_each_once(
    group_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    many = {f"layer{number}.lora_{side}.weight": torch.randn(5 + number, 3) for number in range(20) for side in "AB"}
    save_file(many, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 4}))
    monkeypatch.setattr(served_adapters, "GROUP_BYTES", group_bytes)
    looks, seen, given = list[int](), dict[str, torch.Tensor](), list[torch.Tensor]()

    def look(tensors: Mapping[str, torch.Tensor]) -> None:
        assert not seen.keys() & tensors.keys()
        looks.append(len(tensors))
        seen.update({name: tensor.clone() for name, tensor in tensors.items()})

    def memory(num_bytes: int) -> torch.Tensor:
        given.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return given[-1]

    read = read_adapter(tmp_path, memory, look).tensors
    assert len(looks) == {1: 40, 400: 25, 2**20: 1}[group_bytes]
    assert sum(each.nbytes for each in given) == sum(each.nbytes for each in many.values())
    assert read.keys() == seen.keys() == many.keys()
    for name, tensor in many.items():
        assert torch.equal(read[name], tensor * (4 / 3 if ".lora_B." in name else 1))
        assert torch.equal(read[name], seen[name])


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_a_file_that_ends_early_is_refused(kept: int, tmp_path: Path):
    written(tmp_path, torch.float32)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(RunError, match="no LoRA adapter can be read"):
        read_adapter(tmp_path)


def test_a_file_whose_tensors_overlap_is_refused(tmp_path: Path):
    """B would be scaled twice where both lie."""
    written(tmp_path, torch.float32)
    place = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps(dict.fromkeys(NAMES, place)).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(RunError, match="no LoRA adapter can be read"):
        read_adapter(tmp_path)


def test_memory_that_there_is_not_is_told_as_an_adapter_that_cannot_be_served(tmp_path: Path):
    written(tmp_path, torch.float32)

    def host_memory(num_bytes: int) -> torch.Tensor:
        raise RuntimeError(f"no {num_bytes} bytes can be pinned")

    table = AdapterTable([], [f"support={tmp_path}"], None)
    engine = SimpleNamespace(host_memory=host_memory, put_adapter=None)
    with pytest.raises(RunError, match="adapter 'support': RuntimeError: no 144 bytes can be pinned"):
        asyncio.run(table.begin(engine))


def test_the_engine_is_told_the_fingerprints_of_what_was_read(tmp_path: Path):
    written(tmp_path, torch.float32)
    told = list[Mapping[str, str]]()

    async def put_adapter(name: str, tensors: Any, config: Any, expected: Mapping[str, str]) -> None:
        assert expected == fingerprints(tensors)
        told.append(expected)

    def host_memory(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    engine = SimpleNamespace(host_memory=host_memory, host_fingerprints=fingerprints, put_adapter=put_adapter)
    asyncio.run(AdapterTable([], [f"support={tmp_path}"], None).begin(engine))
    assert [each.keys() for each in told] == [{*NAMES}]


def test_an_adapter_without_its_run_is_served_beside_a_base_that_is_named(tmp_path: Path):
    written(tmp_path, torch.float32)
    with pytest.raises(
        RunError, match=r"an adapter alone is served beside its base: `tandem serve BASE --adapter NAME="
    ):
        served_adapters.base_directory(tmp_path, tmp_path / "base")
