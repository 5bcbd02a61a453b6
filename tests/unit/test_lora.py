"""Adapters: where they may sit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import TOKENIZER, llama, logits

from tandem.errors import SpecError
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.spec.model import LoraSpec

pytestmark = pytest.mark.usefixtures("one_thread")


# --- what they are for


def tied() -> Any:
    return make_model("tiny", TOKENIZER, seed=0)


@pytest.mark.parametrize("make", [tied, llama], ids=["tied", "untied"])
@pytest.mark.parametrize("table", ["embed_tokens", "model.embed_tokens", "lm_head"])
def test_embeddings_and_the_head_take_no_adapter(make: Any, table: str) -> None:
    module = make()
    assert (module.get_input_embeddings().weight is module.get_output_embeddings().weight) == (make is tied)
    with pytest.raises(SpecError) as refused:
        CausalPolicy(module, TOKENIZER, lora=LoraSpec(targets=("q_proj", table)))
    said = str(refused.value)
    assert said.startswith(f"model.lora.targets = ['q_proj', '{table}']: {table}: adapters are for linear layers")
    assert "leave them out or use 'all-linear', or leave [model.lora] out" in said


@pytest.mark.parametrize("make", [tied, llama], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "layers.0.mlp.up_proj")], ids=["all", "named"])
def test_an_export_is_the_policy_wherever_adapters_may_sit(make: Any, targets: Any, tmp_path: Path) -> None:
    import transformers

    policy = CausalPolicy(make(), TOKENIZER, lora=LoraSpec(targets=targets))
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.normal_(std=0.05)
    policy.export(tmp_path)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(served), logits(policy.module), atol=1e-4, rtol=0)
