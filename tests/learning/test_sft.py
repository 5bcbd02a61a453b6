"""`recipe = "sft"` on a file that the test writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from tandem.errors import DataError

SYSTEM = {"role": "system", "content": "Answer in capitals."}


def conversation(rng: random.Random) -> dict[str, Any]:
    """Two turns: a word in capitals, then how often it was asked."""
    words = ["".join(rng.choices("abcde", k=3)) for _ in range(2)]
    turns = [({"role": "user", "content": w}, {"role": "assistant", "content": w.upper()}) for w in words]
    return {"messages": [SYSTEM, *(message for turn in turns for message in turn)]}


def rows_file(path: Path, rows: int = 200, extra: dict[int, str] | None = None) -> Path:
    """`extra` puts raw lines in at their line numbers."""
    rng = random.Random(0)
    lines = [json.dumps(conversation(rng)) for _ in range(rows)]
    for number, line in sorted((extra or {}).items()):
        lines.insert(number - 1, line)
    path.write_text("\n".join(lines) + "\n")
    return path


def spec(data: Path, **data_keys: Any) -> dict[str, Any]:
    return {
        "recipe": "sft",
        "model": {"preset": "tiny"},
        "data": {"kind": "file", "path": str(data), "eval_share": 0.1, **data_keys},
        "train": {"steps": 25, "lr": 2e-3, "batch_size": 16},
        "eval": {"every": 10},
    }


def test_held_out_loss_falls_and_the_verdict_says_so(train: Train, tmp_path: Path):
    trained = train(spec(rows_file(tmp_path / "rows.jsonl")))
    judged, rows = trained.status["eval"], trained.rows("metrics")
    assert (trained.status["state"], trained.status["verdict"], judged["metric"]) == ("succeeded", "improved", "loss")
    assert judged["tasks"] == 20  # a tenth of 200
    assert judged["before"] > 4.5  # a model from scratch knows nothing: ln 266 is 5.6
    assert judged["after"] < judged["step 20"] < judged["step 10"] < judged["before"]
    assert judged["after"] < 2.5
    low, high = judged["interval"]
    assert low <= judged["after_minus_before"] <= high < 0
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert (trained.directory / "export" / "model.safetensors").exists()
    assert trained.rows("sync") == []  # nothing sampled, so nothing was synced


@pytest.mark.parametrize(("lr", "steps"), [(4e-3, 10), (1e-8, 1)], ids=["learned", "did not learn"])
def test_50_rows_end_in_a_verdict_that_they_can_bear(train: Train, tmp_path: Path, lr: float, steps: int):
    asked = spec(rows_file(tmp_path / "rows.jsonl", 50), eval_share=0.05)
    trained = train(asked | {"train": {"steps": steps, "lr": lr, "batch_size": 16}, "eval": {}})
    judged, verdict = trained.status["eval"], trained.status["verdict"]
    assert judged["tasks"] == 8
    low, high = judged["interval"]
    if steps == 10:
        assert (verdict, judged["after"] < 3.0, judged["before"] > 4.5) == ("improved", True, True)
        assert "Improved: held-out loss fell" in trained.printed
    else:
        assert abs(judged["after_minus_before"]) < 1e-4
        assert verdict == ("improved" if high < 0 else "undecided")
        assert low <= judged["after_minus_before"] <= high


def test_12_rows_say_before_and_after_that_no_verdict_can_come_of_them(train: Train, tmp_path: Path):
    asked = spec(rows_file(tmp_path / "rows.jsonl", 12), eval_share=0.05)
    trained = train(asked | {"train": {"steps": 8, "lr": 4e-3, "batch_size": 9}, "eval": {}})
    judged = trained.status["eval"]
    assert (trained.status["verdict"], judged["tasks"]) == ("undecided", 3)
    assert judged["after"] < judged["before"] - 1
    why = "3 held-out examples are too few for a verdict: at 95 % confidence it needs 6"
    assert judged["why"] == why
    before, after = trained.printed.split("── supervised training")
    assert f"the verdict will be undecided: {why}; give it more rows" in before
    assert "Undecided: held-out loss fell from" in after
    assert f"{why}. Hold out more (data.eval_share or data.eval_path)." in " ".join(after.split())


def test_only_the_assistant_s_tokens_count_in_both_turns(train: Train, tmp_path: Path):
    trained = train(spec(rows_file(tmp_path / "rows.jsonl")) | {"train": {"steps": 1, "lr": 1e-3, "batch_size": 16}})
    # Two answers of three letters and the token that ends each, in 16 conversations.
    assert trained.rows("metrics")[0]["tokens/trained"] == 16 * 2 * 4
    shown = next(line for line in trained.printed.splitlines() if "[[" in line)
    trained_parts = [part.split("]]")[0] for part in shown.split("tokens in [[ ]] are trained: ")[1].split("[[")[1:]]
    assert len(trained_parts) == 2
    for part in trained_parts:
        assert part.endswith("<|end|>")
        assert part.removesuffix("<|end|>").isupper()
    assert f"<|system|>{SYSTEM['content']}<|end|><|user|>" in shown


BAD = {3: "{not json", 7: '{"messages": [{"role": "user", "content": "hi"}]}', 9: "[1, 2]"}


def test_bad_rows_stop_the_run_and_are_named_by_their_numbers(train: Train, tmp_path: Path):
    path = rows_file(tmp_path / "rows.jsonl", extra=BAD)
    with pytest.raises(DataError) as refused:
        train(spec(path))
    message = str(refused.value)
    for number in BAD:
        assert f"rows.jsonl:{number})" in message
    assert "203 rows read as chats, 200 used, 3 left out" in message
    assert "data.allow_bad_rows = true" in message
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert not (tmp_path / "run" / "export").exists()


def test_bad_and_too_long_rows_are_left_out_counted_and_printed(train: Train, tmp_path: Path):
    long = json.dumps({"prompt": "x" * 300, "completion": "y"})
    path = rows_file(tmp_path / "rows.jsonl", extra={**BAD, 11: long, 12: long})
    trained = train(
        spec(path, allow_bad_rows=True, max_tokens=100) | {"train": {"steps": 2, "lr": 1e-3, "batch_size": 4}}
    )
    report = next(event for event in trained.rows("events") if event["stage"] == "data")
    assert (report["read"], report["used"]) == (205, 200)
    assert report["dropped"]["longer than 100 tokens"] == 2
    assert sum(report["dropped"].values()) == 5
    assert "205 rows read as chats (200), prompt and completion (2), 200 used, 5 left out" in trained.printed
    assert "2 x longer than 100 tokens" in trained.printed
    for number in (*BAD, 11, 12):
        assert f"rows.jsonl:{number}" in trained.printed


def test_a_file_with_nothing_to_train_on_is_refused(train: Train, tmp_path: Path):
    with pytest.raises(DataError, match="no conversation is left to train on"):
        train(spec(rows_file(tmp_path / "rows.jsonl"), max_tokens=5))


def test_a_held_out_file_is_what_is_judged_on(train: Train, tmp_path: Path):
    held_out = rows_file(tmp_path / "held.jsonl", rows=5)
    rng = random.Random(1)
    train_rows = tmp_path / "rows.jsonl"
    train_rows.write_text("\n".join(json.dumps(conversation(rng)) for _ in range(50)))
    trained = train(
        spec(train_rows, eval_path=str(held_out)) | {"train": {"steps": 2, "lr": 1e-3, "batch_size": 4}, "eval": {}}
    )
    assert trained.status["eval"]["tasks"] == 5
