"""A whole run whose environment is played in workers: warm-up, steps, evaluations, and faults on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conftest import Train

FLAKY = """
import os
import random
from dataclasses import dataclass

from tandem.env.tools import Tools
from tandem.types import Outcome, Task


def add(a: int, b: int) -> int:
    return a + b


@dataclass(frozen=True)
class Flaky:
    parent: int = 0
    tools = Tools(add)

    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": "?"},), {"n": number}) for number in range(8)]

    async def run(self, task, chat):
        assert os.getpid() != self.parent
        chat.offer(self.tools.schemas)
        await self.tools.play(chat, most=2)
        if task.id == "train 3":
            os._exit(9)
        return Outcome(random.SystemRandom().random(), {"correct": 0.0})

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": rng.choice("abc")}]
"""


@pytest.mark.usefixtures("one_thread")
def test_a_run_in_workers_trains_and_counts_what_crashed(train: Train, tmp_path: Path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    spec: dict[str, Any] = {
        "recipe": "rl",
        "deterministic": True,
        "model": {"preset": "tiny"},
        "environment": {
            "name": str(tmp_path / "flaky.py"), "params": {"parent": os.getpid()}, "workers": 4,
            "max_failed_share": 1.0,
        },
        "warmup": {"steps": 1, "batch_size": 4, "lr": 1e-3},
        "train": {"steps": 4, "lr": 1e-3, "groups_per_step": 3, "group_size": 4, "max_tokens": 8},
        "eval": {"tasks": 4},
    }  # fmt: skip
    trained = train(spec)
    assert trained.status["state"] == "succeeded"
    steps = [row for row in trained.rows("metrics") if "groups/played" in row]
    assert len(steps) == 4
    assert sum(row.get("groups/dropped/crashed", 0) for row in steps) >= 1
    assert sum(row.get("episodes/retried/crashed", 0) for row in steps) >= 1
    assert all("env/tool_calls" in row for row in steps)
    options = {row["option"]: row for row in trained.rows("events") if row["stage"] == "option"}
    assert "worker processes end in varying order" in options["deterministic"]["why_not"]
    assert options["environment.episode_timeout_s"]["engaged"]
