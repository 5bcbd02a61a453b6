"""A reward model: trained on pairs, resumed, and loaded by plain transformers, which gives the same scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tandem
from tandem.build.judges import scorer
from tandem.errors import RunError, SpecError
from tandem.model.load_checkpoint import load_model
from tandem.spec.environment import RewardModelJudgeSpec

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")

PAIRS = Path(__file__).parents[2] / "examples" / "data" / "pairs.jsonl"
STOP = "class Stop:\n    def on_step(self, step):\n        assert step.version < {}, 'as planned'\n"


def test_pairs_become_a_reward_model_that_transformers_loads(tmp_path: Path):
    spec: dict[str, Any] = {
        "recipe": "preference", "model": {"preset": "tiny"}, "data": {"path": str(PAIRS), "eval_share": 0.4},
        "algorithm": {"kind": "reward_model"}, "train": {"steps": 12, "batch_size": 16, "lr": 3e-4},
        "checkpoint": {"every": 4}, "callbacks": [f"{tmp_path}/stop.py:Stop"],
    }  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    (tmp_path / "stop.py").write_text(STOP.format(99))
    ended = tandem.run(spec, whole).status
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")
    assert (ended["eval"]["accuracy_before"], ended["eval"]["accuracy_after"] > 0.9) == (0.5, True)
    (tmp_path / "stop.py").write_text(STOP.format(7))
    with pytest.raises(Exception, match="as planned"):
        tandem.run(spec, stopped)
    (tmp_path / "stop.py").write_text(STOP.format(99))
    tandem.resume(stopped)
    assert tandem.digest_run(stopped) == tandem.digest_run(whole)

    score = scorer(RewardModelJudgeSpec(path=str(whole / "export")))
    tokenizer: Any = AutoTokenizer.from_pretrained(whole / "export")
    model: Any = AutoModelForSequenceClassification.from_pretrained(whole / "export")
    assert (model.config.num_labels, type(model).__name__) == (1, "Qwen3ForSequenceClassification")
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()[:8]]
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in rows
        for side in ("chosen", "rejected")
    ]
    padded = tokenizer.apply_chat_template(chats, return_tensors="pt", padding=True, return_dict=True)
    with torch.no_grad():
        theirs = model(**padded).logits[:, 0].tolist()
    assert [score(chat) for chat in chats] == pytest.approx(theirs, abs=1e-5)
    assert all(better > worse for better, worse in zip(theirs[::2], theirs[1::2], strict=True))

    newest = whole / "checkpoints" / "step-12"
    deployed: Any = AutoModelForSequenceClassification.from_pretrained(newest / "deploy")
    assert all(map(torch.equal, deployed.parameters(), model.parameters()))
    with pytest.raises(SpecError, match=r"has a score for a head .* generates no text"):
        load_model(str(whole / "export"), "main", "sdpa")
    with pytest.raises(RunError, match="--gguf q8_0: a reward model has no lm-head"):
        tandem.export_run(whole, gguf="q8_0")
    copied = tandem.export_run(whole)
    assert "pipeline_tag: text-classification" in (copied / "README.md").read_text()
    tandem.run({**spec, "algorithm": {"kind": "dpo"}, "train": {**spec["train"], "steps": 1}}, tmp_path / "dpo")
    with pytest.raises(SpecError, match=r"environment.judge.path = .*: has no score for a head"):
        scorer(RewardModelJudgeSpec(path=str(tmp_path / "dpo" / "export")))
