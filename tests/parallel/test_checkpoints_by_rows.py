"""Whole runs on several ranks: their files are those of one rank, and another number of ranks goes on from them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from crew_cases import cut, do_stages

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


def trained(spec: Path, run_dir: Path, ranks: int) -> Path:
    parallel = {"ranks": ranks, "shares": SHARES}
    tandem("train", spec, "--run-dir", run_dir, *(f"--set=parallel.{name}={value}" for name, value in parallel.items()))
    return run_dir


def gone_on(run_dir: Path, step: int, ranks: int) -> Path:
    """The run as if it had been killed after the checkpoint of `step`, resumed on another number of ranks."""
    cut(run_dir, step)
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


CASES = {
    "adamw_8bit": (1, [(1, 2), (2, 1), (3, 4)]),
    "muon": (1, [(1, 2), (2, 1), (3, 4)]),
    "apollo": (1, [(1, 2), (2, 1), (3, 4)]),
    "adamw": (2, [(1, 2), (2, 1)]),
}
"""Of each optimizer: on how many hosts its 4 ranks are, and after which step the run goes on with how many ranks."""


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case on 1 rank and on 4, and then resumed, each time from what the one before has written."""
    home = tmp_path_factory.mktemp("runs")
    specs = {
        kind: tomllib.loads(spec_of(home, {"path": model}, train={"optimizer": {"kind": kind}}, **BF16).read_text())
        for kind in CASES
    }
    stages = [
        {"ranks": 1, "work": [{"spec": spec, "to": f"{kind}/whole"} for kind, spec in specs.items()]},
        {"ranks": 4, "work": [
            {"spec": spec, "hosts": CASES[kind][0], "to": f"{kind}/0"} for kind, spec in specs.items()
        ]},
    ]  # fmt: skip
    for index in range(max(len(resumed) for _, resumed in CASES.values())):
        moves = {kind: resumed[index] for kind, (_, resumed) in CASES.items() if index < len(resumed)}
        (ranks,) = {ranks for _, ranks in moves.values()}
        work = [
            {"spec": specs[kind], "of": f"{kind}/{index}", "after": step, "to": f"{kind}/{index + 1}"}
            for kind, (step, _) in moves.items()
        ]
        stages.append({"ranks": ranks, "work": work})
    do_stages(home, stages)
    return home


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kind", CASES)
def test_saved_on_4_gone_on_with_2_then_1_then_4(runs: Path, kind: str) -> None:
    """Moments in 8 bits or of other rows than the weights', the missing half of bf16 weights, scalars: every file is
    one rank's, at every step. Of 2 hosts only the first one writes."""
    for index in range(1 + len(CASES[kind][1])):
        same(runs / kind / str(index), runs / kind / "whole")
    assert (runs / kind / "0/checkpoints/step-1/deploy/model.safetensors").stat().st_size > 10**6


def test_adapters_of_2_ranks_are_those_of_one(model: str, tmp_path: Path) -> None:
    """The base is read by rows; the export is merged."""
    spec = spec_of(tmp_path, {"path": model, "lora": {"rank": 4}})
    whole = trained(spec, tmp_path / "whole", 1)
    run_dir = trained(spec, tmp_path / "run", 2)
    same(run_dir, whole)
    same(gone_on(run_dir, 2, 1), whole)
