"""A run begins where another one ended."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from conftest import Train


def sft(data: Path, **model: Any) -> dict[str, Any]:
    return {
        "recipe": "sft",
        "model": {"preset": "tiny", **model},
        "data": {"kind": "file", "path": str(data), "eval_share": 0.2},
        "train": {"steps": 3, "lr": 2e-3, "batch_size": 8},
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("first", "second", "export"),
    [
        ({}, {}, "export"),
        ({"lora": {"rank": 4}}, {"lora": {"rank": 4}}, "export/adapter"),
        ({"lora": {"rank": 4}}, {}, "export"),
        ({"lora": {"rank": 4}}, {}, "export/adapter"),
    ],
    ids=["full", "adapter", "merged into the export", "merged at the start"],
)
def test_the_second_run_s_loss_before_is_the_first_one_s_loss_after(
    train: Train, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], export: str
):
    rng, data = random.Random(0), tmp_path / "rows.jsonl"
    words = ["".join(rng.choices("abcde", k=3)) for _ in range(60)]
    data.write_text("\n".join(json.dumps({"prompt": word, "completion": word.upper()}) for word in words))
    one = train(sft(data, **first), name="one")
    two = train(sft(data, **second, warm_start=str(one.directory / export)), name="two")
    assert one.status["eval"]["after"] < one.status["eval"]["before"] - 0.01
    assert two.status["eval"]["before"] == pytest.approx(one.status["eval"]["after"], abs=1e-5)
    assert two.status["eval"]["after"] < two.status["eval"]["before"] - 0.01
