"""A student learns from a teacher that `tandem serve` has, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_determinism import spec
from test_numerics import merged, rl

from conftest import Train
from tandem.errors import EngineLost

pytestmark = pytest.mark.usefixtures("one_thread", "forked_programs")


@contextmanager
def teacher_served(model: Path, home: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Yield the process, and the tables of a spec that name it."""
    ready = home / "ready.json"
    command = [sys.executable, "-m", "tandem", "serve", str(model), "--port", "0", "--data-dir", str(home / "serve")]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        told = json.loads(ready.read_text())
        server = {"teacher": f"{told['url']}/v1", "teacher_key_file": told["token_file"], "teacher_timeout_s": 20.0}
        yield process, {"algorithm": {"kind": "distill", **server}}
    finally:
        process.kill()
        process.wait()


def test_a_policy_comes_nearer_to_a_served_teacher_as_to_one_of_its_own(train: Train, tmp_path: Path):
    teacher = train(merged(spec(tmp_path), {"warmup": {"steps": 30}, "seed": 3}), name="teacher").directory / "export"
    changes = {"warmup": {"steps": 1}, "train": {"steps": 12, "lr": 2e-3}, "eval": {"tasks": 4, "every": 0}}
    (tmp_path / "keep.py").write_text(
        "import os, signal\nclass Kill:\n    def on_step(self, step):\n"
        "        if step.version == 4:\n            os.kill(int(os.environ['TEACHER']), signal.SIGKILL)\n"
    )
    with teacher_served(teacher, tmp_path) as (process, tables):
        there = rl(train(merged(merged(spec(tmp_path), changes), tables), name="there"))
        os.environ["TEACHER"] = str(process.pid)
        stopped = {**tables, "callbacks": [f"{tmp_path}/keep.py:Kill"], "checkpoint": {"every": 1}}
        with pytest.raises(EngineLost, match=r"algorithm.teacher = 'http://127.0.0.1:.*/v1': ConnectError"):
            train(merged(merged(spec(tmp_path), changes), stopped), name="stopped")
    here = {"algorithm": {"kind": "distill", "teacher": str(teacher)}}
    own = rl(train(merged(merged(spec(tmp_path), changes), here), name="here"))
    gaps = [row["loss/kl"] for row in there]
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3])
    assert gaps[0] == pytest.approx(own[0]["loss/kl"], abs=1e-3), "the first step sees the same answers"
    assert there[0]["tokens/trained"] == own[0]["tokens/trained"]
    assert "memory/reference" not in there[0] or there[0]["memory/reference"] == 0
