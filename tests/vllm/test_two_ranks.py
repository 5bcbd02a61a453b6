"""A run as a user starts it: two ranks train, and send their boxes to a real vLLM of two tensor-parallel workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_cpu import ENVIRONMENT, PYTHON

SPEC = f"""
recipe = "rl"
model = {{ preset = "tiny" }}
environment = {{ name = "sort", params = {{ letters = 3 }} }}
warmup = {{ steps = 150, batch_size = 32, lr = 1e-3 }}
parallel = {{ ranks = 2 }}
engine = {{ kind = "vllm", python = "{PYTHON}", tensor_parallel = 2, max_context = 64 }}
sync = {{ bridge = "broadcast" }}
eval = {{ tasks = 8 }}

[train]
steps = 4
groups_per_step = 4
group_size = 8
max_tokens = 6
max_lag = 1
lr = 1e-4
"""


def test_every_version_of_two_ranks_is_proven_by_both_workers(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(SPEC)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tandem", "train", str(tmp_path / "mine.toml"), "--run-dir", str(run)]
    environment = {**os.environ, **{name: value for name, value in ENVIRONMENT.items() if "MULTIPROC" not in name}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr

    versions = [json.loads(line) for line in (run / "sync.jsonl").read_text().splitlines()]
    assert [each["version"] for each in versions] == [0, 150, 151, 152, 153, 154]
    assert {(each["verified"], each["transport"]["engaged"], each["transport"]["ranks"]) for each in versions} == {
        ("digest", "gloo", "2")
    }
    assert max(each["logprob_gap"] for each in versions) < 1e-5
    assert len({each["digest"] for each in versions}) >= 4  # a step whose groups are all equal moves nothing
