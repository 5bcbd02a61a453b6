"""benchmarks/gpu/real.py on a CPU: what its tasks score, and one job with the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from real_tasks import KINDS, Asked, RealTask

from real_model import real_model

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_number_at_the_end_of_a_reply_earns_1_and_another_0(kind: str):
    played = RealTask(kind, problems=300)
    train, held_out = (
        {task.payload["question"]: task.payload["answer"] for task in played.tasks(split)}
        for split in ("train", "eval")
    )
    assert len(train) > 4 * len(held_out) > 40
    assert not train.keys() & held_out.keys()
    for question, answer in (train | held_out).items():
        assert played.score(question, f"At first 98765, but no: it is {answer}.") == 1.0
        assert played.score(question, f"{answer}, or rather 98765") == 0.0
        assert played.score(question, "I do not know.") == 0.0


def test_a_job_trains_and_asks_the_model_of_each_kept_step(tmp_path: Path):
    model = real_model(tmp_path / "model")
    asked = Asked(
        "chain_sum", "lora", 0, 2, str(model), str(tmp_path), device="cpu", every=1, groups=4, size=8, tokens=12,
        questions=4, engine="hf",
    )  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asdict(asked)))
    job = [sys.executable, str(FOLDER / "real_job.py"), str(tmp_path / "asked.json")]
    subprocess.run(job, check=True, env=os.environ | {"PYTHONPATH": str(FOLDER.parents[1] / "src")})
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(point["step"], len(point["right"])) for point in found["curve"]] == [(0, 4), (1, 4), (2, 4)]
    assert 0 < found["curve"][1]["seconds"] < found["curve"][2]["seconds"] == found["train_s"] < found["whole_s"]
    assert 32 <= found["curve"][1]["tokens"] < found["tokens"] <= 2 * 32 * 12
    assert found["plan"]["answer_tokens"] == found["tokens"] / 64
