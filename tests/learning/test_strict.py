"""A strict run ends for what its spec asks for and cannot have, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conftest import Train
from tandem import recipes
from tandem.errors import SpecError
from tandem.spec.hardware import Hardware
from tandem.spec.toml import read_toml
from tandem.text.tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")

ENVIRONMENT = """
from tandem import Outcome, Task


class Sums:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": "+" * n},), {}) for n in range(8)]

    async def run(self, task, chat):
        return Outcome(float(sum(map(ord, (await chat.reply()).text)) % 7))
"""


def hybrid(path: Path, conv_cache: int = 3) -> str:
    """A model whose states take in padding, by a bias, so that its prompts are computed one length after the other."""
    tokenizer = byte_tokenizer()
    config = transformers.Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], conv_bias=True, conv_L_cache=conv_cache,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.model.layers[0].conv.in_proj.bias.data, std=0.1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_what_tandem_tries_by_itself_is_reported_and_what_the_spec_asks_for_ends_a_strict_run(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    spec: dict[str, Any] = {
        "recipe": "rl", "device": "cpu", "strict": True, "model": {"path": hybrid(tmp_path / "model")},
        "environment": {"name": f"{tmp_path / 'sums.py'}:Sums"}, "eval": {"tasks": 2},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
    }  # fmt: skip
    trained = train(spec)
    options = {event["option"]: event for event in trained.rows("events") if event["stage"] == "option"}
    told = options["prompts of different lengths"]
    assert (told["requested"], told["engaged"]) == ("auto", False)
    assert told["why_not"].startswith("padding before a prompt changes what Lfm2ShortConv computes")
    assert "prompts of different lengths = auto: not engaged, padding" in trained.printed
    with pytest.raises(SpecError, match=r"CUDA graphs of decode steps = graphs: is not available, .*strict = false"):
        train(spec | {"engine": {"eager": False}}, name="asked")


def test_what_is_chosen_for_a_gpu_ends_no_strict_run_where_it_is_not_available(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no kernel for packed rows, and compiles no layers; here the choice is that of a GPU."""
    rows = [{"prompt": "+" * n, "completion": "-" * n} for n in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec: dict[str, Any] = {
        "recipe": "sft", "device": "cpu", "strict": True, "model": {"path": hybrid(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl")}, "train": {"steps": 30, "batch_size": 2, "lr": 1e-3},
    }  # fmt: skip
    monkeypatch.setattr(recipes, "this_machine", lambda device: Hardware("cuda", "a GPU", 79.0))
    trained = train(spec)
    (trained.directory / "status.json").unlink()
    recipes.resume(trained.directory)
    options = [event for event in trained.rows("events") if event["stage"] == "option"]
    for name in ("model.attention", "model.compile"):
        told = [(each["requested"], each["engaged"]) for each in options if each["option"] == name]
        assert told == [("auto", False)] * 2
    assert read_toml(trained.directory / "spec.toml")["model"]["attention"] == "packed"


def test_a_field_that_was_left_out_ends_no_strict_run_also_resumed_and_the_same_value_written_does(
    train: Train, tmp_path: Path
) -> None:
    """This run cannot have states of 64 rows in half of so small a cache, nor equal bytes of overlapping workers."""
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    spec: dict[str, Any] = {
        "recipe": "rl", "device": "cpu", "strict": True, "model": {"path": hybrid(tmp_path / "model", conv_cache=32)},
        "environment": {"name": f"{tmp_path / 'sums.py'}:Sums", "workers": 1}, "eval": {"tasks": 2},
        "engine": {"kv_gib": 2.5e-4},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 8, "max_lag": 1},
    }  # fmt: skip
    trained = train(spec)
    options = {event["option"]: event for event in trained.rows("events") if event["stage"] == "option"}
    told = {
        name: (options[name]["requested"], options[name]["engaged"]) for name in ("deterministic", "requests at once")
    }
    assert told == dict.fromkeys(told, ("auto", False))
    with pytest.raises(SpecError, match=r"requests at once = 64: is not available, .*strict = false"):
        train(spec | {"engine": {"kv_gib": 2.5e-4, "max_running": 64}}, name="rows")
    with pytest.raises(SpecError, match=r"deterministic = True: is not available, .*strict = false"):
        train(spec | {"deterministic": True}, name="bytes")
    (trained.directory / "status.json").unlink()  # as if it had been killed
    assert recipes.resume(trained.directory)["state"] == "succeeded"
    again = {event["option"]: event["requested"] for event in trained.rows("events") if event["stage"] == "option"}
    assert again == {name: option["requested"] for name, option in options.items()}
    with pytest.raises(SpecError, match=r"deterministic = True: is not available, .*strict = false"):
        recipes.resume(tmp_path / "bytes")
