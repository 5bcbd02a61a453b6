"""Small runs in this process, for tests that interrupt them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem import recipes
from tandem.obs.live_view import LiveView
from tandem.spec.load import parse_spec

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


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
