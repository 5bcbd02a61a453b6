"""Files and data sets become conversations, some of them held out."""

from __future__ import annotations

import builtins
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tandem.data.load import DataSplit, load_rows
from tandem.data.preference_pairs import load_pairs
from tandem.errors import DataError, SpecError
from tandem.spec.data import DatasetData, FileData
from tandem.spec.load import parse_spec

ROWS = [{"prompt": f"question {i}", "completion": f"answer {i}", "extra": i} for i in range(100)]


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def prompts(conversations) -> set[str]:
    return {conversation.messages[0]["content"] for conversation in conversations}


def numbers(split: DataSplit) -> list[int]:
    return sorted(conversation.row for conversation in (*split.train, *split.held_out))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_jsonl_file_is_split_and_every_row_is_used_once(tmp_path):
    split = load_rows(FileData(path=write(tmp_path / "a.jsonl", ROWS), eval_share=0.1))
    assert (len(split.train), len(split.held_out)) == (90, 10)
    assert not prompts(split.train) & prompts(split.held_out)
    assert numbers(split) == list(range(1, 101))
    assert split.train[0].messages == (
        {"role": "user", "content": f"question {split.train[0].row - 1}"},
        {"role": "assistant", "content": f"answer {split.train[0].row - 1}"},
    )
    assert split.report.text() == "100 rows read as prompt and completion, 100 used, 0 left out"


def test_the_same_rows_are_held_out_in_any_order_and_process(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    here = prompts(load_rows(FileData(path=path)).held_out)
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    assert prompts(load_rows(FileData(path=write(tmp_path / "b.jsonl", shuffled))).held_out) == here
    code = (
        "from tandem.data.load import load_rows; from tandem.spec.data import FileData; "
        f"print('|'.join(sorted(c.messages[0]['content'] for c in load_rows(FileData(path={path!r})).held_out)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.strip().split("|")) == here
    assert len(here) == 8


def test_a_row_that_is_there_twice_is_on_one_side(tmp_path):
    split = load_rows(FileData(path=write(tmp_path / "a.jsonl", ROWS + ROWS), eval_share=0.3))
    assert not prompts(split.train) & prompts(split.held_out)
    assert len(split.train) + len(split.held_out) == 200


@pytest.mark.parametrize(
    ("share", "rows", "held_out"),
    [(0.0, 100, 0), (0.001, 100, 8), (0.5, 100, 50), (0.05, 50, 8), (0.05, 32, 8), (0.05, 31, 7), (0.05, 2, 1)],
)
def test_the_asked_share_is_held_out_and_at_least_eight_rows_or_a_quarter(tmp_path, share, rows, held_out):
    path = write(tmp_path / "a.jsonl", ROWS[:rows])
    split = load_rows(FileData(path=path, eval_share=share))
    assert (len(split.train), len(split.held_out)) == (rows - held_out, held_out)


def test_one_question_that_most_rows_share_never_leaves_nothing_to_train_on(tmp_path):
    for often in range(2):
        rows = [ROWS[often]] * 39 + [ROWS[1 - often]]  # one of the two has the smaller digest
        split = load_rows(FileData(path=write(tmp_path / "a.jsonl", rows), eval_share=0.9))
        assert split.train
        assert split.held_out


def test_a_single_row_is_trained_on(tmp_path):
    split = load_rows(FileData(path=write(tmp_path / "a.jsonl", ROWS[:1])))
    assert (len(split.train), len(split.held_out)) == (1, 0)


def test_max_examples_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", [*ROWS[:7], "not JSON"])
    assert numbers(load_rows(FileData(path=path, max_examples=7))) == [1, 2, 3, 4, 5, 6, 7]


def test_an_eval_file_is_the_held_out_part(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", ROWS[:80]), write(tmp_path / "b.jsonl", ROWS[80:])
    split = load_rows(FileData(path=train, eval_path=held_out, max_examples=50))
    assert (len(split.train), len(split.held_out)) == (50, 20)
    assert {conversation.source for conversation in split.held_out} == {held_out}


def test_a_training_row_that_is_also_in_the_eval_file_is_a_bad_row(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", ROWS[:80]), write(tmp_path / "b.jsonl", ROWS[78:])
    with pytest.raises(DataError, match=r"2 x also among the held-out rows \(.*a\.jsonl:79, .*a\.jsonl:80\)"):
        load_rows(FileData(path=train, eval_path=held_out))
    split = load_rows(FileData(path=train, eval_path=held_out, allow_bad_rows=True))
    assert (len(split.train), len(split.held_out)) == (78, 22)


BAD = [*ROWS[:3], "{oops", "", "[1]", {"prompt": "x", "completion": ""}, ROWS[3], "[" * 100_000, ROWS[4]]


def test_bad_rows_stop_the_run_with_line_numbers_and_the_way_out(tmp_path):
    path = write(tmp_path / "a.jsonl", BAD)
    with pytest.raises(DataError) as error:
        load_rows(FileData(path=path), "warmup.data")
    text = str(error.value)
    assert text.startswith("warmup.data: 9 rows read as prompt and completion, 5 used, 4 left out")
    assert f"2 x not JSON ({path}:4, {path}:9)" in text
    assert f"1 x not an object ({path}:6)" in text
    assert f"1 x empty content ({path}:7)" in text
    assert "warmup.data.allow_bad_rows = true" in text


def test_allowed_bad_rows_are_left_out_and_reported(tmp_path):
    split = load_rows(FileData(path=write(tmp_path / "a.jsonl", BAD), allow_bad_rows=True, eval_share=0.2))
    assert numbers(split) == [1, 2, 3, 8, 10]
    assert (split.report.read, split.report.used) == (9, 5)


def test_a_byte_order_mark_is_no_fault_and_other_bytes_are(tmp_path):
    line = json.dumps(ROWS[0]).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line.replace(b"question", b"\xff"))
    split = load_rows(FileData(path=str(tmp_path / "a.jsonl"), allow_bad_rows=True))
    assert numbers(split) == [1]
    assert split.report.by_reason() == {"not UTF-8": 1}


def test_nothing_but_bad_rows_is_an_error_even_where_they_are_allowed(tmp_path):
    with pytest.raises(DataError, match="no conversation to train on"):
        load_rows(FileData(path=write(tmp_path / "a.jsonl", ["x"]), allow_bad_rows=True))
    with pytest.raises(DataError, match="no conversation to train on"):
        load_rows(FileData(path=write(tmp_path / "b.jsonl", [])))
    eval_path = write(tmp_path / "c.jsonl", ["x"])
    with pytest.raises(DataError, match="no conversation to evaluate on"):
        load_rows(FileData(path=write(tmp_path / "d.jsonl", ROWS), eval_path=eval_path, allow_bad_rows=True))


def test_conversations_can_be_left_out_afterwards_and_are_reported(tmp_path):
    split = load_rows(FileData(path=write(tmp_path / "a.jsonl", ROWS), eval_share=0.5))
    left = split.without(lambda c: "too long" if len(c.messages[0]["content"]) > len("question 9") else "")
    assert prompts([*left.train, *left.held_out]) == {f"question {i}" for i in range(10)}
    assert left.report.by_reason() == {"too long": 90}
    assert left.report.used == 10


def test_parquet_gives_what_jsonl_gives(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}", "name": "me"}, {"role": "assistant", "content": "a"}]}
            for i in range(3000)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    of_parquet = load_rows(FileData(path=str(tmp_path / "a.parquet"), max_examples=2500))
    of_jsonl = load_rows(FileData(path=write(tmp_path / "a.jsonl", rows), max_examples=2500))
    assert [(c.row, c.messages) for c in of_parquet.train] == [(c.row, c.messages) for c in of_jsonl.train]
    assert of_parquet.report.read == 2500


def test_images_in_a_column_of_a_parquet_file_are_no_more_left_out_than_those_of_jsonl(tmp_path):
    answers = {"completion": "red", "chosen": "red", "rejected": "blue"}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "Which?", **answers, "image": "a.png"}]), tmp_path / "a.parquet"
    )
    data = FileData(path=str(tmp_path / "a.parquet"), eval_share=0.0)
    for load in (partial(load_rows, keep_images=lambda messages: messages), load_pairs):
        assert len(load(data).train) == 1
        with pytest.raises(DataError, match="1 x a column 'image', which is not read") as error:
            load(data, sees=True)
        assert "say which column" not in str(error.value)


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_rows(FileData(path=str(tmp_path / "a.parquet")))


def test_a_file_that_is_not_there_is_refused_by_its_field(tmp_path):
    with pytest.raises(DataError, match=r"warmup\.data\.path = '.*none\.jsonl': no such file in"):
        load_rows(FileData(path=str(tmp_path / "none.jsonl")), "warmup.data")
    with pytest.raises(DataError, match=r"data\.eval_path"):
        load_rows(FileData(path=write(tmp_path / "a.jsonl", ROWS), eval_path=str(tmp_path / "none.jsonl")))


def test_what_is_no_file_of_rows_and_what_is_no_data_set_are_refused_with_the_other_field():
    raw = {"recipe": "sft", "model": {"preset": "tiny"}, "train": {"steps": 1, "lr": 0.1}}
    with pytest.raises(SpecError, match=r'data\.path = "rows\.xlsx": must be a file that ends in .*data\.name'):
        parse_spec({**raw, "data": {"path": "rows.xlsx"}})
    with pytest.raises(SpecError, match=r'data\.name = "rows\.csv": names a file; write it as path'):
        parse_spec({**raw, "data": {"kind": "dataset", "name": "rows.csv"}})


def test_a_directory_of_jsonl_files_is_a_data_set(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", ROWS[:80])
    write(tmp_path / "set" / "test.jsonl", ROWS[80:])
    split = load_rows(DatasetData(name=str(tmp_path / "set"), eval_split="test"))
    assert (len(split.train), len(split.held_out)) == (80, 20)
    assert split.train[0].messages[1] == {"role": "assistant", "content": "answer 0"}
    assert split.train[0].source == f"{tmp_path / 'set'}[train]"
    with pytest.raises(DataError, match="split 'validation'"):
        load_rows(DatasetData(name=str(tmp_path / "set"), split="validation"))


def test_a_saved_data_set_is_read_without_its_other_columns(tmp_path):
    turns = [({"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}) for i in range(10)]
    rows = [{"messages": list(pair)} for pair in turns]
    saved = datasets.Dataset.from_list([{**row, "id": 1} for row in rows])
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        split = load_rows(DatasetData(name=str(tmp_path / name), eval_share=0.2))
        assert (len(split.train), len(split.held_out)) == (8, 2)
    with pytest.raises(DataError, match=r"data\.split = 'test': '.*several' has train"):
        load_rows(DatasetData(name=str(tmp_path / "several"), split="test"))


def test_a_data_set_that_is_not_there_is_refused_by_its_name(tmp_path):
    with pytest.raises(DataError, match=r"data\.name = '.*/nowhere'"):
        load_rows(DatasetData(name=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("missing", ["pyarrow", "datasets"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, missing):
    real_import = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == missing:
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    (tmp_path / "a.parquet").write_text("hello")
    spec = FileData(path=str(tmp_path / "a.parquet")) if missing == "pyarrow" else DatasetData(name="someone/something")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=rf"needs {missing}; pip install 'tandem-rl\[data\]'"):
        load_rows(spec)


def test_jsonl_needs_neither_torch_nor_the_extra(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    code = (
        "import sys; from tandem.data.load import load_rows; from tandem.spec.data import FileData; "
        f"load_rows(FileData(path={path!r})); print([m for m in ('torch', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
