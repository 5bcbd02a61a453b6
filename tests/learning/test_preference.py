"""`recipe = "preference"` on a file that the test writes: which of two answers is better, the model has to find out."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from tandem.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")


WORDS = random.Random(0).sample(["".join(letters) for letters in itertools.product("abcde", repeat=3)], 120)


def rows_file(path: Path, words: Sequence[str] = WORDS, *, swapped: bool = False, extra: Sequence[str] = ()) -> Path:
    """A word copied in capitals is better than the word as it is; both have the same length."""
    rows = [(word, word.upper(), word) if not swapped else (word, word, word.upper()) for word in words]
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) for row in rows]
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return path


def spec(data: Path, **data_keys: Any) -> dict[str, Any]:
    return {
        "recipe": "preference",
        "model": {"preset": "tiny"},
        "data": {"kind": "file", "path": str(data), "eval_share": 0.25, **data_keys},
        "train": {"steps": 12, "lr": 3e-4, "batch_size": 8},
        "algorithm": {"beta": 0.1},
        "eval": {"every": 6},
    }


def test_held_out_pairs_are_ranked_right_and_the_verdict_says_so(train: Train, tmp_path: Path) -> None:
    trained = train(spec(rows_file(tmp_path / "rows.jsonl")))
    judged, rows = trained.status["eval"], trained.rows("metrics")
    assert (trained.status["state"], trained.status["verdict"], judged["metric"]) == ("succeeded", "improved", "loss")
    assert judged["before"] == pytest.approx(math.log(2), abs=1e-6)  # the policy is the reference
    assert judged["accuracy_before"] == 0.5
    assert judged["accuracy_after"] >= 0.9
    assert judged["after"] < judged["step 6"] < judged["before"]
    assert judged["interval"][1] < 0
    assert rows[0]["loss/total"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["reward/margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["reward/margin"] > 0.5
    assert rows[-1]["reward/accuracy"] == 1
    assert rows[5]["eval/accuracy"] == judged["accuracy_step 6"]
    assert rows[-1]["reward/margin"] == pytest.approx(rows[-1]["reward/chosen"] - rows[-1]["reward/rejected"], abs=1e-4)
    assert (trained.directory / "export" / "model.safetensors").exists()
    assert "the tokens in [[ ]] are trained" in trained.printed


def test_swapped_answers_teach_the_opposite(train: Train, tmp_path: Path) -> None:
    """The control: what was learned stood in the labels, not in the answers."""
    held_out = rows_file(tmp_path / "held.jsonl", WORDS[:30])
    swapped = rows_file(tmp_path / "rows.jsonl", WORDS[30:], swapped=True)
    trained = train(spec(swapped, eval_path=str(held_out)))
    judged = trained.status["eval"]
    assert trained.rows("metrics")[-1]["reward/accuracy"] == 1  # on the labels that it saw
    assert (trained.status["verdict"], judged["tasks"]) == ("worse", 30)
    assert judged["accuracy_after"] <= 0.1
    assert judged["interval"][0] > 0


def test_adapters_have_their_own_base_as_the_reference(train: Train, tmp_path: Path) -> None:
    asked = spec(rows_file(tmp_path / "rows.jsonl"))
    asked["model"] = {"preset": "tiny", "lora": {"rank": 8}}
    asked["train"] = {"steps": 12, "lr": 3e-3, "batch_size": 8}
    judged = train(asked).status["eval"]
    assert judged["before"] == pytest.approx(math.log(2), abs=1e-6)
    assert judged["accuracy_after"] >= 0.9


def test_bad_and_too_long_pairs_are_left_out_counted_and_printed(train: Train, tmp_path: Path) -> None:
    long = json.dumps({"prompt": "hi", "chosen": "x" * 100, "rejected": "y"})
    bad = ('{"prompt": "hi", "chosen": "x"}', '{"prompt": "hi", "chosen": "x", "rejected": "x"}', long)
    path = rows_file(tmp_path / "rows.jsonl", WORDS[:20], extra=bad)
    with pytest.raises(DataError) as refused:
        train(spec(path), name="refused")
    assert "23 rows read as prompt, chosen and rejected, 21 used, 2 left out" in str(refused.value)
    few = {"train": {"steps": 1, "lr": 1e-4, "batch_size": 2}, "eval": {}}
    trained = train(spec(path, allow_bad_rows=True, max_tokens=60) | few)
    report = next(event for event in trained.rows("events") if event["stage"] == "data")
    assert (report["read"], report["used"]) == (23, 20)
    assert report["dropped"]["chosen: longer than 60 tokens"] == 1
    for number in (21, 22, 23):
        assert f"rows.jsonl:{number}" in trained.printed


def test_a_file_with_nothing_to_train_on_is_refused(train: Train, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pair is left to train on"):
        train(spec(rows_file(tmp_path / "rows.jsonl", WORDS[:10]), max_tokens=5))


def test_without_held_out_pairs_nothing_is_claimed(train: Train, tmp_path: Path) -> None:
    asked = spec(rows_file(tmp_path / "rows.jsonl", WORDS[:10]), eval_share=0.0)
    trained = train(asked | {"train": {"steps": 1, "lr": 1e-4, "batch_size": 2}})
    assert (trained.status["verdict"], trained.status["eval"]["tasks"]) == ("undecided", 0)
