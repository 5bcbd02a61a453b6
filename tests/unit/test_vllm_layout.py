"""Which layers of a model in vLLM are refused; the layers here stand in for vLLM's own."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import SyncError
from tandem.vllm_worker.served_memory import ServedMemory, layout_of


class Attention(torch.nn.Module):
    __module__ = "vllm.attention.layer"

    def __init__(self) -> None:
        super().__init__()
        for name in ("_q_scale", "_k_scale"):
            self.register_buffer(name, torch.tensor(1.0))


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Attention(), Attention())


def test_attention_with_a_scale_is_refused_with_its_value():
    made = model()
    assert set(layout_of(made).scales) == {"0._q_scale", "0._k_scale", "1._q_scale", "1._k_scale"}
    made.get_buffer("1._k_scale").fill_(0.25)
    with pytest.raises(SyncError, match=r"'1\._k_scale' is 0\.25, not 1"):
        layout_of(made)


def test_a_scale_that_is_written_into_later_is_seen():
    made = model()
    served = ServedMemory(layout_of(made))
    served.check_derived()
    made.get_buffer("0._q_scale").fill_(0.5)
    with pytest.raises(SyncError, match=r"'0\._q_scale' is not what this engine derived"):
        served.check_derived()
