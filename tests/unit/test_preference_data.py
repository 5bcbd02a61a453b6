"""Rows become a prompt with two answers; pairs become groups of two recordings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tandem.data.conversation import BadRow
from tandem.data.preference_pairs import Pair, load_pairs, parse_pair
from tandem.errors import DataError, SpecError
from tandem.rollout.recorded_producer import record_pair
from tandem.spec.data import DatasetData, FileData
from tandem.spec.load import parse_spec, to_toml
from tandem.spec.preference import DpoSpec
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Trajectory

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "hello"}
BAD = {"role": "assistant", "content": "what"}
SYSTEM = {"role": "system", "content": "be kind"}
MORE = {"role": "user", "content": "and?"}
NOTHING_SHARED = "no prompt, and chosen and rejected have no common beginning"


# --- one row


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "hello", "rejected": "what"},
        {"prompt": "hi", "chosen": [GOOD], "rejected": "what", "score": 1.0},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER]},
        {"prompt": "hi", "chosen": [{**USER, "name": None}, GOOD], "rejected": "what"},
    ],
)
def test_every_good_shape_gives_the_same_pair(row: Any) -> None:
    assert parse_pair(row) == ((USER,), (GOOD,), (BAD,))


def test_all_that_both_begin_with_is_the_prompt_an_answer_of_the_assistant_included() -> None:
    whole = {"chosen": [SYSTEM, USER, GOOD, MORE, GOOD], "rejected": [SYSTEM, USER, GOOD, MORE, BAD, MORE, BAD]}
    expected = ((SYSTEM, USER, GOOD, MORE), (GOOD,), (BAD, MORE, BAD))
    assert parse_pair(whole) == expected
    apart = {name: messages[2:] for name, messages in whole.items()}
    assert parse_pair({"prompt": [SYSTEM, USER], **apart}) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["hi"], "not an object"),
        (BadRow("not JSON"), "not JSON"),
        ({}, "no chosen in its columns ()"),
        ({"prompt": "hi", "rejected": "what"}, "no chosen in its columns (prompt, rejected)"),
        ({"prompt": "hi", "chosen": "x", "rejected": None}, "no rejected in its columns (prompt, chosen, rejected)"),
        ({"prompt": "hi", "chosen": "", "rejected": "what"}, "chosen: empty content"),
        ({"prompt": "hi", "chosen": "hello", "rejected": " \n"}, "rejected: empty content"),
        ({"prompt": "hi", "chosen": "hello", "rejected": []}, "rejected: no messages"),
        ({"prompt": [], "chosen": "hello", "rejected": "what"}, "prompt: no messages"),
        ({"prompt": "", "chosen": "hello", "rejected": "what"}, "prompt: empty content"),
        ({"prompt": 5, "chosen": "hello", "rejected": "what"}, "prompt: messages are not a list"),
        ({"prompt": "hi", "chosen": [{"content": "x"}], "rejected": "what"}, "chosen: a message without role"),
        ({"prompt": "hi", "chosen": "\ud800", "rejected": "x"}, "chosen: text that is not Unicode (a lone surrogate)"),
        ({"prompt": "hi", "chosen": "same", "rejected": "same"}, "chosen and rejected are equal"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen and rejected are equal"),
        ({"chosen": "hello", "rejected": "what"}, NOTHING_SHARED),
        ({"chosen": [USER, GOOD], "rejected": [MORE, BAD]}, NOTHING_SHARED),
        ({"prompt": "hi", "chosen": [MORE, GOOD], "rejected": "what"}, "chosen: does not begin with the prompt"),
        ({"prompt": "hi", "chosen": "hello", "rejected": [USER]}, "rejected: the last turn is not the assistant's"),
        (
            {"prompt": "hi", "chosen": [GOOD, MORE, GOOD], "rejected": [GOOD]},
            "one of chosen and rejected is the beginning of the other",
        ),
        (
            {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, USER, GOOD]},
            "chosen and rejected first differ at a turn that is not the assistant's",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_row_has_its_reason(row: object, reason: str) -> None:
    with pytest.raises(BadRow) as bad:
        parse_pair(row)
    assert str(bad.value) == reason


# --- files and data sets

ROWS = [{"prompt": f"question {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "extra": i} for i in range(40)]


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def contents(pairs: Sequence[Pair]) -> list[tuple[str, str, str]]:
    return [(pair.prompt[0]["content"], pair.chosen[0]["content"], pair.rejected[0]["content"]) for pair in pairs]


def test_jsonl_parquet_and_a_data_set_give_the_same_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    jsonl = load_pairs(FileData(path=write(tmp_path / "a.jsonl", ROWS), eval_share=0.1))
    parquet = load_pairs(FileData(path=str(tmp_path / "a.parquet"), eval_share=0.1))
    saved = load_pairs(DatasetData(name=str(tmp_path / "set"), eval_share=0.1))
    assert (len(jsonl.train), len(jsonl.held_out)) == (32, 8)
    assert contents(jsonl.train) == contents(parquet.train) == contents(saved.train)
    assert contents(jsonl.held_out) == contents(parquet.held_out) == contents(saved.held_out)
    first = jsonl.train[0].row - 1
    assert contents(jsonl.train)[0] == (f"question {first}", f"yes {first}", f"no {first}")


def test_pairs_with_the_same_prompt_are_on_one_side(tmp_path: Path) -> None:
    rows = [{**row, "chosen": f"{row['chosen']} {again}"} for row in ROWS for again in range(3)]
    split = load_pairs(FileData(path=write(tmp_path / "a.jsonl", rows), eval_share=0.2))
    train, held_out = ({prompt for prompt, _, _ in contents(pairs)} for pairs in (split.train, split.held_out))
    assert not train & held_out
    assert (len(split.train), len(split.held_out)) == (96, 24)


def test_bad_rows_stop_the_run_with_line_numbers_and_the_way_out(tmp_path: Path) -> None:
    bad = [*ROWS[:3], "{oops", {"prompt": "x", "chosen": "y"}, {"prompt": "x", "chosen": "y", "rejected": "y"}]
    path = write(tmp_path / "a.jsonl", [*bad, {"prompt": "x", "chosen": "y", "rejected": ""}])
    with pytest.raises(DataError) as error:
        load_pairs(FileData(path=path))
    text = str(error.value)
    assert text.startswith("data: 7 rows read as prompt, chosen and rejected, 3 used, 4 left out")
    assert f"1 x not JSON ({path}:4)" in text
    assert f"1 x no rejected in its columns (prompt, chosen) ({path}:5)" in text
    assert f"1 x chosen and rejected are equal ({path}:6)" in text
    assert f"1 x rejected: empty content ({path}:7)" in text
    assert "data.allow_bad_rows = true" in text
    assert load_pairs(FileData(path=path, allow_bad_rows=True, eval_share=0.0)).report.used == 3
    with pytest.raises(DataError, match="no pair to train on"):
        load_pairs(FileData(path=write(tmp_path / "b.jsonl", ["x"]), allow_bad_rows=True))


# --- a pair as a group


def test_a_pair_is_a_group_of_two_recordings_that_trains_the_answers_alone() -> None:
    renderer = Renderer(byte_tokenizer())
    prompt = [SYSTEM, USER, GOOD, MORE]
    group = record_pair(renderer, prompt, [GOOD], [BAD, MORE, BAD], "rows.jsonl:7")
    assert [trajectory.reward for trajectory in group] == [1.0, 0.0]
    assert {trajectory.task_id for trajectory in group} == {"rows.jsonl:7"}

    def trained(trajectory: Trajectory) -> str:
        ids = [token for token, counts in zip(trajectory.ids, trajectory.trained, strict=True) if counts]
        return renderer.decode(ids, skip_special=False)

    # Not the assistant's "hello" of the prompt, which stands in both.
    assert [trained(each) for each in group] == ["hello<|end|>", "what<|end|>what<|end|>"]
    shared = len(renderer.prompt(prompt))
    assert group[0].ids[:shared] == group[1].ids[:shared] == renderer.prompt(prompt)
    assert not any(group[0].trained[:shared] + group[1].trained[:shared])


# --- the spec

SPEC = {
    "recipe": "preference",
    "model": {"preset": "tiny"},
    "data": {"kind": "file", "path": "pairs.jsonl"},
    "train": {"steps": 8, "lr": 1e-4},
}


def test_a_preference_spec_loads_and_survives_a_round_trip() -> None:
    spec = parse_spec(SPEC)
    assert spec.recipe == "preference"
    assert spec.algorithm == DpoSpec()
    assert parse_spec(tomllib.loads(to_toml(spec))) == spec


@pytest.mark.parametrize(
    ("change", "shown", "way_out"),
    [
        ({"algorithm": {"kind": "grpo"}}, 'algorithm.kind = "grpo"', "'dpo'"),
        ({"algorithm": {"bta": 0.2}}, "algorithm.bta = 0.2: unknown here", "did you mean 'beta'?"),
        ({"algorithm": {"beta": 0.0}}, "algorithm.beta = 0.0", "must be positive"),
        ({"algorithm": {"label_smoothing": 0.5}}, "algorithm.label_smoothing = 0.5", "less than 0.5"),
        ({"algorithm": {"sft_coef": -1.0}}, "algorithm.sft_coef = -1.0", "greater than or equal to 0"),
        ({"train": {"steps": 8, "lr": 1e-4, "group_size": 2}}, "train.group_size = 2: unknown here", "batch_size"),
        ({"data": {"kind": "demonstrations"}}, 'data.kind = "demonstrations"', "'file'"),
        ({"environment": {"name": "sort"}}, "environment", "unknown here"),
        (
            {"train": {"steps": 8, "lr": 1e-4, "schedule": {"kind": "linear", "warmup_steps": 8}}},
            "train.schedule.warmup_steps = 8",
            "below train.steps = 8",
        ),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_way_out(change: Any, shown: str, way_out: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({**SPEC, **change})
    assert str(refused.value).startswith(shown)
    assert way_out in str(refused.value)


def test_an_unknown_recipe_is_told_of_this_one() -> None:
    with pytest.raises(SpecError, match='recipe = "preference"'):
        parse_spec({**SPEC, "recipe": "dpo"})
