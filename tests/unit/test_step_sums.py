"""A step's numbers are read from the device once; a meta tensor has no numbers, so reading one earlier raises."""

from __future__ import annotations

import pytest
import torch

from tandem.algo import cispo, grpo, ppo, sft
from tandem.algo.reference_anchor import anchored
from tandem.spec.algorithm import CispoSpec, GrpoSpec, PpoSpec
from tandem.train.logprob_gap import Gap
from tandem.train.step_sums import StepSums
from tandem.types import MicroBatch, PackedRows, TokenLogprobs, Totals

ALGORITHMS = {
    "grpo": grpo.make(GrpoSpec(kl_coef=0.1)),
    "ppo": ppo.make(PpoSpec()),
    "cispo": cispo.make(CispoSpec()),
    "sft": sft.make(),
    "anchored": anchored(sft.make(), 0.1),
}


def on_meta() -> tuple[TokenLogprobs, MicroBatch]:
    float_N, int_N = torch.zeros(6, device="meta"), torch.zeros(6, dtype=torch.long, device="meta")
    packed = PackedRows((int_N, int_N, 0, 0, None), int_N, int_N)
    micro = MicroBatch(
        int_N, int_N, int_N, int_N, packed, int_N, int_N, float_N, float_N, int_N, float_N, int_N, int_N[:2], float_N
    )
    return TokenLogprobs(float_N.clone().requires_grad_(), float_N), micro


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_reads_nothing_from_the_device(name: str):
    scored, micro = on_meta()
    loss, sums = ALGORITHMS[name].loss(scored, micro, Totals(6, 2))
    found = StepSums()
    found.add({"loss/total": loss})
    found.add(sums, 6)
    gap = Gap()
    gap.add(scored, micro, 3)
    loss.backward()
    for read in (found.read, gap.numbers):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            read()


def test_sums_are_added_in_64_bits():
    found = StepSums()
    for value in (2.0**24, 1.0, 1.0):
        found.add({"loss/a": torch.tensor(value, requires_grad=True), "loss/b": 0.5}, 2)
    assert found.read() == {"loss/a": 2.0**23 + 1.0, "loss/b": 0.75}
    assert StepSums().read() == {}
