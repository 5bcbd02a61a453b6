"""A loss, an optimizer and a callback of the user's own in SFT and on pairs: trained, resumed to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tandem

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
MINE = """
import torch

def focal(scored, micro, totals, power=1.0):
    known_N = scored.logprobs_N.exp()
    loss_N = -micro.credit_N * (1 - known_N) ** power * scored.logprobs_N
    return loss_N.sum() / totals.tokens, {"mine/known": known_N.sum()}

def squared(scored, micro, totals, margin=2.0):
    gain_N = micro.credit_N * (scored.logprobs_N - micro.reference_N)
    margin_P = micro.pair_sums(gain_N)
    return (margin_P - margin).square().sum() / totals.sequences, {"mine/known": margin_P.sum()}

class SignMomentum:
    def init(self, like):
        return {"momentum": torch.zeros_like(like)}
    def update(self, value, grad, state, *, lr, step):
        state["momentum"].lerp_(grad, 0.1)
        value.sub_(lr * state["momentum"].sign())

class Count:
    def __init__(self):
        self.total = 0
    def on_step(self, step):
        self.total += int(step.tokens.mask_T.sum())
        return {"mine/total": self.total, "mine/sft": float(step.stage == "sft")}
    def state(self):
        return {"total": self.total}
    def restore(self, state):
        self.total = state["total"]
"""


OWN = {
    "sft": lambda home: {"name": f"{home}/mine.py:focal", "params": {"power": 0.5}},
    "preference": lambda home: {"name": f"{home}/mine.py:squared", "reference": True},
}
STOPS = 'def on_step(self, step):\n        assert step.version < 4, "as planned"\n        self.total'


def spec(recipe: str, home: Path) -> dict[str, Any]:
    file = {"sft": "tickets.jsonl", "preference": "pairs.jsonl"}[recipe]
    return {
        "recipe": recipe, "model": {"preset": "tiny"}, "data": {"path": str(EXAMPLES / file), "eval_share": 0.4},
        "callbacks": [f"{home}/mine.py:Count"], "checkpoint": {"every": 1},
        "train": {"steps": 6, "batch_size": 16, "lr": 3e-4, "optimizer": {"kind": f"{home}/mine.py:SignMomentum"}},
        "algorithm": OWN[recipe](home),
    }  # fmt: skip


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["sft", "preference"])
def test_a_loss_an_optimizer_and_a_callback_learn_and_resume_to_the_same_bytes(recipe: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ended = tandem.run(spec(recipe, tmp_path), whole).status
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")
    totals = [row["mine/total"] for row in rows(whole)]
    assert totals == sorted(set(totals))
    known = [row["mine/known"] for row in rows(whole)]
    assert known[-1] > known[0]
    assert "SHA-256" in (whole / "report.html").read_text()
    assert {row["mine/sft"] for row in rows(whole)} == {float(recipe == "sft")}
    (tmp_path / "mine.py").write_text(MINE.replace("def on_step(self, step):\n        self.total", STOPS))
    with pytest.raises(Exception, match="as planned"):
        tandem.run(spec(recipe, tmp_path), stopped)
    (tmp_path / "mine.py").write_text(MINE)
    tandem.resume(stopped)
    assert tandem.digest_run(stopped) == tandem.digest_run(whole)
    assert [row["mine/total"] for row in rows(stopped)] == totals
