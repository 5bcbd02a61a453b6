"""Runs that are taken up again in this process: from any checkpoint, after SIGTERM, on a disk that was full, at their end.

A run with every checkpoint still there stands for one that was killed after each of them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem import recipes
from tandem.errors import CheckpointUnsaved
from tandem.io.manifest import digest_of
from tandem.obs.live import LiveView
from tandem.recipes import build
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.resume import digest_run
from tandem.spec.load import parse_spec

pytestmark = pytest.mark.usefixtures("one_thread", "torch_as_it_was")

ENVIRONMENT = """
from tandem.types import Outcome, Task


class Ascii:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": f"{split} {number}"},)) for number in range(40)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "".join(rng.choices("abcdefgh", k=rng.randint(2, 6)))}]
"""


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def view() -> LiveView:
    return LiveView("run", Console(file=io.StringIO(), width=120))


def rl(home: Path, **changes: Any) -> dict[str, Any]:
    (home / "ascii.py").write_text(ENVIRONMENT)
    return {
        "recipe": "rl",
        "model": {"preset": "tiny", **changes.get("model", {})},
        "environment": {"name": changes.get("environment", str(home / "ascii.py"))},
        "warmup": {"steps": 2, "lr": 1e-3, "batch_size": 4},
        "train": {
            "steps": changes.get("steps", 4), "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 6,
            "max_lag": changes.get("max_lag", 0),
        },
        "algorithm": {"kind": "grpo", "kl_coef": 0.05},
        "eval": {"tasks": 4, "every": 2},
        "checkpoint": {"every": 1, "keep_every": 1},
    }  # fmt: skip


def sft(home: Path, steps: int = 12, **checkpoint: Any) -> dict[str, Any]:
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(30)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return {
        "recipe": "sft",
        "model": {"preset": "tiny"},
        "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "train": {"steps": steps, "lr": 1e-3, "batch_size": 4},
        "checkpoint": {"every": 1, **checkpoint},
    }


def train(spec: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    return recipes.run(parse_spec(spec), run_dir, view=view()).status


def resume(run_dir: Path) -> dict[str, Any]:
    return dict(recipes.resume(run_dir, view=view()))


def killed_after(whole: Path, version: int, run_dir: Path) -> Path:
    """As it was when the checkpoint of `version` was the last thing that it had written, and more rows had been begun."""
    shutil.copytree(whole, run_dir)
    for later in Checkpoints(run_dir).versions():
        if later > version:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{later}")
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**status, "state": "running"}))
    return run_dir


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def content(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): digest_of(path) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("model", "versions"), [({}, (1, 2, 4)), ({"lora": {"rank": 4}}, (4,))], ids=["GRPO", "LoRA"]
)
def test_from_any_checkpoint_a_run_comes_to_the_same_bytes(
    tmp_path: Path, model: dict[str, Any], versions: tuple[int, ...]
) -> None:
    """Also from one that was saved after an evaluation (4), which has shared the engine with nobody."""
    train(rl(tmp_path, model=model, steps=3), tmp_path / "whole")
    expected = digest_run(tmp_path / "whole")
    for version in versions:
        run = killed_after(tmp_path / "whole", version, tmp_path / f"killed-{version}")
        assert resume(run)["state"] == "succeeded"
        assert digest_run(run) == expected, f"from step {version}"
