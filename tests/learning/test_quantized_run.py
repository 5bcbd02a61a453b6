"""RL on adapters over a base in few bits, from the spec to what `tandem serve` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import Train
from tandem.build import built_model
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.recipes.serve import find_model
from tandem.spec.model import PathModel
from tandem.spec.precision import Float32Precision
from tandem.text.tokenizer import byte_tokenizer

ENVIRONMENT = """
from tandem import Outcome, Task


class Sums:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def run(self, task, chat):
        return Outcome(float(sum(map(ord, (await chat.reply()).text)) % 7))
"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_run_samples_and_trains_on_few_bits_and_its_export_is_served(train: Train, tmp_path: Path, base: str):
    CausalPolicy(make_model("tiny", byte_tokenizer(), seed=5), byte_tokenizer()).export(tmp_path / "model")
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    spec: dict[str, Any] = {
        "recipe": "rl",
        "model": {"path": str(tmp_path / "model"), "lora": {"rank": 4, "base": base}},
        "environment": {"name": f"{tmp_path / 'sums.py'}:Sums"},
        "train": {"steps": 2, "lr": 1e-2, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
        "algorithm": {"kind": "grpo", "kl_coef": 0.1},
        "eval": {"tasks": 4},
        "strict": True,
    }
    trained = train(spec)
    (option,) = [row for row in trained.rows("events") if row.get("option") == "model.lora.base"]
    assert (option["requested"], option["engaged"]) == (f"{base}: 28 layers, 93% of the weights", True)
    gaps = [row["sync/logprob_gap"] for row in trained.rows("metrics") if "sync/logprob_gap" in row]
    assert gaps
    assert max(gaps) < 1e-4
    adapter = load_file(trained.directory / "export" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    path, _, version = find_model(str(trained.directory))
    assert version == 2
    served = built_model.model(PathModel(path=path), Float32Precision(), 0, torch.device("cpu"))
    assert len(served.policy.trainable()) == 46
