"""Whole runs on several ranks: their files are those of one rank, and another number of ranks goes on from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from crew_cases import do_stages

from tandem.runs.run_ending import digest_run
from tandem.text.tokenizer import byte_tokenizer

STEPS = 4
BF16 = {"precision": {"weights": "bfloat16", "master": "split"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory in two files: tied, with rows that 2 and 4 do not divide, and as wide as a block of 256."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 1, hidden_size=256, intermediate_size=258, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    assert config.vocab_size % 2
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory, max_shard_size="3MB")
    tokenizer.save_pretrained(directory)
    return str(directory)


def spec_of(home: Path, model: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "recipe": "sft", "model": model, "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "train": {"steps": STEPS, "lr": 1e-3, "batch_size": 4, **more.pop("train", {})}, "eval": {"every": 3},
        "checkpoint": {"every": 1, "keep_last": 100}, **more,
    }  # fmt: skip


def hashes(run_dir: Path) -> dict[str, str]:
    """Of every file of every checkpoint and of the export, but for what tells the time or which rows were read."""
    found = [path for part in ("checkpoints", "export") for path in (run_dir / part).rglob("*") if path.is_file()]
    return {
        path.relative_to(run_dir).as_posix(): hashlib.sha256(content_of(path)).hexdigest()
        for path in found
        if path.name not in ("MANIFEST.json", "state.json")
    }


def content_of(path: Path) -> bytes:
    """What peft takes out of a set has another order in each process, on one rank, too."""
    if path.name != "adapter_config.json":
        return path.read_bytes()
    told = json.loads(path.read_text())
    return json.dumps({**told, "target_modules": sorted(told["target_modules"])}, sort_keys=True).encode()


def same(run_dir: Path, whole: Path) -> None:
    found, expected = hashes(run_dir), hashes(whole)
    assert {name for name in expected if found.get(name) != expected[name]} == set()
    assert found.keys() == expected.keys()
    assert {f"checkpoints/step-{step}/{file}.safetensors" for step in range(1, STEPS + 1) for file in FILES} <= set(
        found
    )
    assert digest_run(run_dir) == digest_run(whole)


FILES = ("weights", "optimizer")


CASES = {"adamw_8bit": 1, "muon": 1, "apollo": 1, "adamw": 2}
"""Of each optimizer: on how many hosts its 4 ranks are."""


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case on 1, and on 4 ranks; and resumed from what one number of ranks has saved by another number: 1 to 4,
    4 to 2, and 2 to 1. Adapters on 1 and on 2 ranks, and 2 to 1."""
    home = tmp_path_factory.mktemp("runs")
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(40)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    specs = {kind: spec_of(home, {"path": model}, train={"optimizer": {"kind": kind}}, **BF16) for kind in CASES}
    lora = spec_of(home, {"path": model, "lora": {"rank": 4}})

    def resumed(of: str, after: int, to: str) -> list[dict[str, Any]]:
        return [
            {"spec": spec, "of": f"{kind}/{of}", "after": after, "to": f"{kind}/{to}"} for kind, spec in specs.items()
        ]

    do_stages(home, [
        {"ranks": 1, "work": [
            *({"spec": spec, "to": f"{kind}/whole"} for kind, spec in specs.items()),
            {"spec": lora, "to": "lora/whole"},
        ]},
        {"ranks": 4, "work": [
            *({"spec": spec, "hosts": CASES[kind], "to": f"{kind}/4"} for kind, spec in specs.items()),
            *resumed("whole", 3, "1-4"),
        ]},
        {"ranks": 2, "work": [*resumed("4", 1, "4-2"), {"spec": lora, "to": "lora/2"}]},
        {"ranks": 1, "work": [
            *resumed("4-2", 2, "4-2-1"),
            {"spec": lora, "of": "lora/2", "after": 2, "to": "lora/2-1"},
        ]},
    ])  # fmt: skip
    return home


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kind", CASES)
def test_what_1_4_and_2_ranks_saved_goes_on_with_4_2_and_1(runs: Path, kind: str) -> None:
    """Moments in 8 bits or of other rows than the weights', the missing half of bf16 weights, scalars: every file is
    one rank's, at every step. Of 2 hosts only the first one writes."""
    for other in ("4", "1-4", "4-2", "4-2-1"):
        same(runs / kind / other, runs / kind / "whole")
    assert (runs / kind / "4/checkpoints/step-1/deploy/model.safetensors").stat().st_size > 10**6


@pytest.mark.timeout(1100)
def test_adapters_of_2_ranks_are_those_of_one(runs: Path) -> None:
    """The base is read by rows; the export is merged."""
    for other in ("2", "2-1"):
        same(runs / "lora" / other, runs / "lora" / "whole")
