"""Two runs of one spec leave the same bytes; another seed leaves others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Train, Trained
from tandem.types import MEASURED

pytestmark = pytest.mark.usefixtures("no_report")

# Rewards that differ between siblings from the first step on: a model that has learned nothing says bytes of all kinds.
SCORED = """
from dataclasses import dataclass

from tandem.types import Outcome, Task


@dataclass(frozen=True)
class Ascii:
    def tasks(self, split):
        words = [f"{split} {number}" for number in range(40)]
        return [Task(word, ({"role": "user", "content": word},)) for word in words]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "".join(rng.choices("abcdefgh", k=rng.randint(2, 6)))}]
"""


def spec(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "scored.py").write_text(SCORED)
    return {
        "recipe": "rl",
        "seed": changes.get("seed", 0),
        "model": {"preset": "tiny", **changes.get("model", {})},
        "environment": {"name": str(tmp_path / "scored.py")},
        "warmup": {"steps": 6, "lr": 1e-3, "batch_size": 8},
        "train": {
            "steps": 3,
            "lr": 1e-3,
            "groups_per_step": 4,
            "group_size": 4,
            "max_tokens": 8,
            "max_lag": changes.get("max_lag", 0),
        },
        "eval": {"tasks": 8, "every": 2},
    }


def metrics(trained: Trained) -> bytes:
    """metrics.jsonl without its timings; the order of keys counts."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in trained.rows("metrics")
    ]
    assert [row["step"] for row in rows] == list(range(1, 10))
    return json.dumps(rows).encode()


def weights(trained: Trained) -> bytes:
    return (trained.directory / "export" / "model.safetensors").read_bytes()


CASES = [
    pytest.param({}, id="full"),
    pytest.param({"model": {"lora": {"rank": 4}}}, id="lora"),
    pytest.param({"max_lag": 1}, id="one version of lag"),
]


@pytest.mark.parametrize("changes", CASES)
def test_two_runs_of_one_spec_leave_the_same_bytes(train: Train, tmp_path: Path, changes: dict[str, Any]):
    first, second = (train(spec(tmp_path, **changes), name=name) for name in ("first", "second"))
    assert metrics(first) == metrics(second)
    assert weights(first) == weights(second)
    assert first.rows("samples") == second.rows("samples")
    rl = [row for row in first.rows("metrics") if row["stage"] == "rl"]
    assert max(row["lag/max"] for row in rl) == changes.get("max_lag", 0)  # the lag was really there
    assert min(row["grad/norm"] for row in rl) > 0  # and something was learned from


def test_another_seed_leaves_other_bytes(train: Train, tmp_path: Path):
    first, second = (train(spec(tmp_path, seed=seed), name=str(seed)) for seed in (0, 1))
    assert metrics(first) != metrics(second)
    assert weights(first) != weights(second)
