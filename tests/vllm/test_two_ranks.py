"""A run as a user starts it: two ranks train, and a real vLLM of two tensor-parallel workers serves every version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_cpu import ENVIRONMENT, PYTHON

from tandem.spec.presets import preset_config
from tandem.text.tokenizer import byte_tokenizer

SPEC = f"""
recipe = "rl"
model = MODEL
environment = {{ name = "sort", params = {{ letters = 3 }} }}
warmup = {{ steps = 150, batch_size = 32, lr = 1e-3 }}
parallel = {{ ranks = 2 }}
engine = {{ kind = "vllm", python = "{PYTHON}", tensor_parallel = 2, max_context = 64 }}
sync = SYNC
eval = {{ tasks = 8 }}

[train]
steps = STEPS
groups_per_step = 4
group_size = 8
max_tokens = 6
lr = 1e-4
"""


def trained(home: Path, **settings: str) -> list[dict[str, Any]]:
    """Return the proofs of a run."""
    spec = SPEC
    for name, value in settings.items():
        spec = spec.replace(name, value)
    (home / "mine.toml").write_text(spec)
    run = home / "run"
    command = [sys.executable, "-m", "tandem", "train", str(home / "mine.toml"), "--run-dir", str(run)]
    environment = {**os.environ, **{name: value for name, value in ENVIRONMENT.items() if "MULTIPROC" not in name}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (run / "sync.jsonl").read_text().splitlines()]


def test_every_version_of_two_ranks_is_proven_by_both_workers(tmp_path: Path):
    sync = '{ bridge = "broadcast" }'
    versions = trained(tmp_path, MODEL='{ preset = "tiny" }', SYNC=sync, STEPS="4\nmax_lag = 1")
    assert [each["version"] for each in versions] == [0, 150, 151, 152, 153, 154]
    assert {(each["verified"], each["transport"]["engaged"], each["transport"]["ranks"]) for each in versions} == {
        ("digest", "gloo", "2")
    }
    assert max(each["logprob_gap"] for each in versions) < 1e-5
    assert len({each["digest"] for each in versions}) >= 4  # a step whose groups are all equal moves nothing


def test_two_ranks_train_in_the_memory_of_both_workers(tmp_path: Path):
    """Nothing is sent, and both ends read back the same: q, k, v and gate, up in vLLM's fused rows, o and down in
    columns."""
    write_model(tmp_path / "model")
    model, sync = f'{{ path = "{tmp_path / "model"}" }}', '{ bridge = "shared", digest = true }'
    versions = trained(tmp_path, MODEL=model, SYNC=sync, STEPS="3")
    assert [each["version"] for each in versions] == [0, 150, 151, 152, 153]
    assert {(each["verified"], each["bytes_moved"]) for each in versions} == {("identity", 0)}
    assert max(each["logprob_gap"] for each in versions) < 1e-5
    assert len({each["digest"] for each in versions}) >= 3


def write_model(directory: Path) -> None:
    """The tiny preset, with as many token ids as vLLM cuts without padding, and fewer heads of keys and values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(54)
    config = {**preset_config("tiny", len(tokenizer)), "num_key_value_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**config, **ends)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
