"""Runs in every precision, with every optimizer and algorithm: they train on what they sample and say what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_determinism import spec

from conftest import Train, Trained
from tandem.errors import NothingLearned, SpecError

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")

SPLIT = {"weights": "bfloat16"}


def rl(trained: Trained) -> list[dict[str, Any]]:
    return [row for row in trained.rows("metrics") if row["stage"] == "rl"]


def options(trained: Trained) -> dict[str, dict[str, Any]]:
    return {event["option"]: event for event in trained.rows("events") if event["stage"] == "option"}


def merged(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        table[key] = (
            merged(table[key], value) if isinstance(value, dict) and isinstance(table.get(key), dict) else value
        )
    return table


OPTIMIZERS = ["adamw_8bit", "adamw_offload", "adafactor", "muon", "apollo", "apollo_mini"]
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"train": {"optimizer": {"kind": kind}}, "precision": SPLIT} for kind in OPTIMIZERS},
    "fp32 copy": {"precision": {**SPLIT, "master": "fp32"}},
    "stochastic": {"precision": {**SPLIT, "master": "stochastic"}},
    "in place": {"precision": {**SPLIT, "master": "none"}},
    "released": {"precision": SPLIT, "train": {"gradient_release": True}},
    "lora+ on bf16": {"precision": SPLIT, "model": {"lora": {"rank": 4}}, "train": {"lora_plus": 4.0}},
    "recomputed": {"precision": SPLIT, "model": {"activations": "selective"}},
    "nucleus": {"train": {"top_p": 0.8}},
    **{kind: {"algorithm": {"kind": kind}} for kind in ("dapo", "gspo", "cispo", "reinforce_pp", "ppo")},
    "kl": {"algorithm": {"kind": "dr_grpo", "kl_coef": 0.1, "kl_estimator": "k2"}, "model": {"lora": {"rank": 4}}},
    "sequence masked": {
        "algorithm": {"kind": "dr_grpo", "correction": {"kind": "mask_sequence"}}, "train": {"max_lag": 1}
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_run_trains_on_what_its_engine_samples(train: Train, tmp_path: Path, changes: dict[str, Any]) -> None:
    short = {"warmup": {"steps": 4}, "eval": {"tasks": 4, "every": 0}}
    trained = train(merged(merged(spec(tmp_path), short), changes))
    assert trained.status["state"] == "succeeded"
    for row in rl(trained):
        assert row["grad/norm"] > 0
        assert row["update/effective_fraction"] > 0
        assert row["memory/accounted"] > row["memory/weights"] > 0
        if row["lag/max"] == 0:
            assert row["sync/logprob_gap"] < (0.02 if "precision" in changes else 1e-5)
    if "precision" in changes:
        in_place, lora = changes["precision"].get("master") == "none", "lora" in changes.get("model", {})
        assert ("precision.master" in options(trained)) is not lora
        lost = max(row["update/lost_energy"] for row in rl(trained))
        assert lost > 0.01 if in_place else lost < (0.2 if changes["precision"].get("master") == "stochastic" else 1e-9)


def test_what_was_asked_for_and_cannot_be_had_is_said(train: Train, tmp_path: Path) -> None:
    changes = {"train": {"optimizer": {"kind": "adamw_offload"}}, "model": {"activations": "offload"}, "device": "cpu"}
    trained = train(merged(spec(tmp_path), changes))
    for option in ("train.optimizer.kind", "model.activations"):
        assert options(trained)[option]["engaged"] is False
        assert "host" in options(trained)[option]["why_not"]
        assert option in trained.printed
    with pytest.raises(SpecError, match="strict = false"):
        train({**merged(spec(tmp_path), changes), "strict": True}, name="strict")


def test_split_and_a_float32_copy_are_the_same_run(train: Train, tmp_path: Path) -> None:
    """Warm-up and RL: the missing bits outlive the stage. On the CPU: a GPU's sums have no order."""
    asked = {**spec(tmp_path), "device": "cpu"}
    both = [train({**asked, "precision": {**SPLIT, "master": master}}, name=master) for master in ("split", "fp32")]
    exports = [(each.directory / "export" / "model.safetensors").read_bytes() for each in both]
    assert exports[0] == exports[1]
    assert [row["loss/total"] for row in both[0].rows("metrics")] == [
        row["loss/total"] for row in both[1].rows("metrics")
    ]


# --- a teacher


def test_a_policy_comes_nearer_to_its_teacher_token_by_token(train: Train, tmp_path: Path) -> None:
    teacher = train(merged(spec(tmp_path), {"warmup": {"steps": 30}, "seed": 3}), name="teacher").directory / "export"
    changes = {
        "warmup": {"steps": 1},
        "train": {"steps": 12, "lr": 2e-3},
        "algorithm": {"kind": "distill", "teacher": str(teacher)},
        "eval": {"tasks": 4, "every": 0},
    }
    rows = rl(train(merged(spec(tmp_path), changes), name="student"))
    gaps = [row["loss/kl"] for row in rows]
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3])
    assert rows[0]["memory/reference"] > 0


def test_a_teacher_with_another_vocabulary_is_refused(train: Train, tmp_path: Path) -> None:
    teacher = train(spec(tmp_path), name="teacher").directory / "export"
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[:2]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(tokenizer))
    changes = {"algorithm": {"kind": "distill", "teacher": str(teacher)}}
    with pytest.raises(SpecError, match=r"algorithm.teacher = .* differs from the policy's in 4 entries"):
        train(merged(spec(tmp_path), changes), name="student")


# --- training that trains nothing


def test_a_stage_whose_rewards_are_all_equal_fails(train: Train, tmp_path: Path) -> None:
    table = spec(tmp_path)
    same = (tmp_path / "scored.py").read_text().replace("Outcome(sum(", "Outcome(0 * sum(")
    (tmp_path / "same.py").write_text(same)
    with pytest.raises(NothingLearned, match="3 steps, and none of them changed a weight: no token"):
        train(merged(table, {"environment": {"name": str(tmp_path / "same.py")}}))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"


def test_updates_that_are_all_rounded_away_end_the_run(train: Train, tmp_path: Path) -> None:
    changes = {
        "precision": {**SPLIT, "master": "none"},
        "train": {"lr": 1e-12, "steps": 30, "max_idle_steps": 3},
        "eval": {"tasks": 4, "every": 0},
    }
    with pytest.raises(NothingLearned, match=r"3 steps in a row, up to version 9, .* rounded away"):
        train(merged(spec(tmp_path), changes))
