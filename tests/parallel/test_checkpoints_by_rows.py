"""Whole runs on several ranks: their files are those of one rank, and another number of ranks goes on from them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.runs.run_ending import digest_run
from tandem.spec.load import parse_spec, to_toml
from tandem.text.tokenizer import byte_tokenizer

STEPS, SHARES = 4, 4
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


def spec_of(home: Path, model: dict[str, Any], **more: Any) -> Path:
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(40)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    spec = {
        "recipe": "sft", "model": model, "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "train": {"steps": STEPS, "lr": 1e-3, "batch_size": 4, **more.pop("train", {})}, "eval": {"every": 3},
        "checkpoint": {"every": 1, "keep_last": 100}, **more,
    }  # fmt: skip
    (home / "spec.toml").write_text(to_toml(parse_spec(spec)))
    return home / "spec.toml"


def tandem(*words: object) -> None:
    command = [sys.executable, "-m", "tandem", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def trained(spec: Path, run_dir: Path, ranks: int, hosts: int = 1) -> Path:
    parallel = {"ranks": ranks, "hosts": hosts, "shares": SHARES}
    tandem("train", spec, "--run-dir", run_dir, *(f"--set=parallel.{name}={value}" for name, value in parallel.items()))
    return run_dir


def gone_on(run_dir: Path, step: int, ranks: int) -> Path:
    """The run as if it had been killed after the checkpoint of `step`, resumed on another number of ranks."""
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(run_dir / "export")
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**status, "state": "running"}))
    tandem("resume", run_dir, "--set", f"parallel.ranks={ranks}")
    return run_dir


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


@pytest.mark.parametrize("kind", ["adamw_8bit", "muon", "apollo"])
def test_saved_on_4_gone_on_with_2_then_1_then_4(model: str, tmp_path: Path, kind: str) -> None:
    """Moments in 8 bits or of other rows than the weights', the missing half of bf16 weights, scalars: every file is
    one rank's, at every step."""
    spec = spec_of(tmp_path, {"path": model}, train={"optimizer": {"kind": kind}}, **BF16)
    whole = trained(spec, tmp_path / "whole", 1)
    run_dir = trained(spec, tmp_path / "run", 4)
    same(run_dir, whole)
    for step, ranks in ((1, 2), (2, 1), (3, 4)):
        same(gone_on(run_dir, step, ranks), whole)
    assert (run_dir / "checkpoints/step-1/deploy/model.safetensors").stat().st_size > 10**6


def test_saved_on_2_hosts_gone_on_with_one_then_with_one_rank(model: str, tmp_path: Path) -> None:
    """Only the first host writes."""
    spec = spec_of(tmp_path, {"path": model}, **BF16)
    whole = trained(spec, tmp_path / "whole", 1)
    run_dir = trained(spec, tmp_path / "run", 4, hosts=2)
    same(run_dir, whole)
    for step, ranks in ((1, 2), (2, 1)):
        same(gone_on(run_dir, step, ranks), whole)


def test_adapters_of_2_ranks_are_those_of_one(model: str, tmp_path: Path) -> None:
    """The base is read by rows; the export is merged."""
    spec = spec_of(tmp_path, {"path": model, "lora": {"rank": 4}})
    whole = trained(spec, tmp_path / "whole", 1)
    run_dir = trained(spec, tmp_path / "run", 2)
    same(run_dir, whole)
    same(gone_on(run_dir, 2, 1), whole)
