"""A base of adapters that is another process's memory."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from tandem.bridge.shared import cuda_ipc
from tandem.bridge.shared.adapter_base import BorrowedBase
from tandem.build import built_model
from tandem.spec.model import LoraSpec, PresetModel
from tandem.spec.precision import Bfloat16Precision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model() -> Any:
    spec = PresetModel(preset="tiny", lora=LoraSpec(rank=4))
    return built_model.model(spec, Bfloat16Precision(), 0, torch.device("cuda"))


def engine(end: Any) -> None:
    """Lends its base; then it ends, and with it its side of the memory."""
    end.send(cuda_ipc.export(dict(model().policy.base())))
    end.recv()


def test_it_is_read_there_and_survives_who_lent_it():
    ours = model()
    before = {name: tensor.clone() for name, tensor in ours.policy.base()}
    ids = torch.arange(16, device="cuda")[None]
    said = ours.policy.module(ids).logits
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(there,))
    process.start()
    base = BorrowedBase(torch.device("cuda", 0), ours.policy.base_in)
    assert base.state()["why_not"]
    base.attached([{"base_memory": {"why_not": "", "exported": here.recv()}}])
    assert base.state() == {"requested": True, "engaged": True, "why_not": "", "bytes": base.state()["bytes"]}
    assert base.state()["bytes"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.policy.base())
    mapped = ours.policy.module(ids).logits  # of memory that lies otherwise: cuBLAS may take another kernel
    torch.testing.assert_close(mapped, said, rtol=0.02, atol=0.02)
    here.send("end")
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(ours.policy.module(ids).logits, mapped)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.policy.base())


def test_memory_of_another_shape_is_refused_and_nothing_moves():
    ours = model()
    where = {name: tensor.data_ptr() for name, tensor in ours.policy.base()}
    base = BorrowedBase(torch.device("cuda", 0), ours.policy.base_in)
    base.attached([{"base_memory": {"why_not": "vLLM may put it to sleep"}}])
    assert base.state()["why_not"] == "vLLM may put it to sleep"
    assert {name: tensor.data_ptr() for name, tensor in ours.policy.base()} == where
