"""A shorter quickstart: three letters instead of five, a fifth of the steps."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from conftest import QUICKSTART, Train, Trained, trained
from tandem.recipes.export import export_run
from tandem.spec.load import load_spec

pytestmark = pytest.mark.usefixtures("one_thread")

SHORTER = (
    "environment.params.letters=3",
    "warmup.steps=120",
    "train.steps=40",
    "train.groups_per_step=8",
    "eval.tasks=128",
    "checkpoint.keep_every=120",  # what the warm-up made
)


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(load_spec(QUICKSTART, SHORTER), tmp_path_factory.mktemp("quickstart") / "run")


def test_a_shorter_quickstart_raises_held_out_accuracy_and_leaves_a_whole_run(shorter: Trained):
    _judged(shorter)
    _recorded(shorter)
    _served_as_it_was_trained(shorter)


def _judged(trained: Trained) -> None:
    status, judged = trained.status, trained.status["eval"]
    assert (status["state"], status["verdict"], status["steps_done"]) == ("succeeded", "improved", 160)
    assert judged["before"] <= 0.02  # before the warm-up, nobody sorts
    assert 0.02 <= judged["before_rl"] <= 0.45
    assert judged["after"] - judged["before_rl"] >= 0.25
    low, high = judged["interval"]
    assert 0 < low <= judged["after"] - judged["before_rl"] <= high
    assert all(isinstance(judged[key], float) for key in ("before_rl", "after"))
    assert judged["tasks"] == 128


def _recorded(trained: Trained) -> None:
    names = {path.name for path in trained.directory.iterdir()}
    files = {"spec.toml", "status.json", "metrics.jsonl", "sync.jsonl", "events.jsonl", "log.txt", "samples.jsonl"}
    assert files | {"report.html", "curves.png", "export"} <= names
    rows = trained.rows("metrics")
    assert [row["step"] for row in rows] == list(range(1, 161))
    rl = [row for row in rows if row["stage"] == "rl"]
    assert len(rl) == 40
    assert max(row["lag/max"] for row in rl) == 0
    assert max(row["sync/logprob_gap"] for row in rl) < 1e-5
    last_ten, first_ten = (sum(row["reward/mean"] for row in part) / 10 for part in (rl[-10:], rl[:10]))
    assert last_ten > first_ten
    synced = trained.rows("sync")
    assert {proof["verified"] for proof in synced} == {"identity"}
    assert sum(proof["bytes_moved"] for proof in synced) == 0
    assert [version for version in range(120, 161) if version not in {proof["version"] for proof in synced}] == []
    assert [event["number"] for event in trained.rows("events")] == list(range(1, len(trained.rows("events")) + 1))
    for said in ("evaluation before RL", "Improved", "tandem serve"):
        assert said in trained.printed


def _served_as_it_was_trained(trained: Trained) -> None:
    """The export, loaded by transformers alone, says greedily what the engine said at the end of the run."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = str(trained.directory / "export")
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    played = [sample for sample in trained.rows("samples") if sample["when"] == "after"]
    assert len(played) == 8
    for sample in played:
        *opening, answer = sample["messages"]
        ids = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True).strip() == answer["content"].strip()


PERMUTED = '''
"""Sorting, with the rewards of siblings handed round: what remains is noise of the same size."""

import asyncio
from dataclasses import dataclass, field

from tandem.env.builtin.sort import Sort
from tandem.env.builtin.split import in_split
from tandem.types import Outcome


@dataclass(frozen=True)
class Permuted(Sort):
    siblings: int = 16
    waiting: dict = field(default_factory=dict)

    async def run(self, task, chat):
        mine = await super().run(task, chat)
        if in_split("eval", task.payload["answer"]):
            return mine
        arrived, all_here = self.waiting.setdefault(task.id, ([], asyncio.Event()))
        place = len(arrived)
        arrived.append(mine.reward)
        if len(arrived) == self.siblings:
            del self.waiting[task.id]
            all_here.set()
        await all_here.wait()
        return Outcome(arrived[(place * 7 + 3) % self.siblings], mine.metrics)
'''


def test_with_the_rewards_of_siblings_permuted_accuracy_does_not_rise(shorter: Trained, train: Train, tmp_path: Path):
    """The control: as many rewards from the same warm-up, given to the wrong answers."""
    (tmp_path / "permuted.py").write_text(PERMUTED)
    table = tomllib.loads(QUICKSTART.read_text())
    del table["warmup"]
    table["model"] = {"path": str(export_run(shorter.directory, step=120, directory=tmp_path / "warm"))}
    table["environment"] = {"name": str(tmp_path / "permuted.py"), "params": {"letters": 3}}
    table["train"] |= {"steps": 20, "groups_per_step": 8}
    table["eval"]["tasks"] = 128
    permuted = train(table)
    judged = permuted.status["eval"]
    assert judged["before_rl"] == shorter.status["eval"]["before_rl"] >= 0.02  # so it could have gone either way
    assert permuted.status["verdict"] != "improved"
    assert judged["after"] <= judged["before_rl"] + 0.05
    rl = permuted.rows("metrics")
    assert sum(row["grad/norm"] > 0 for row in rl) == len(rl) == 20
