"""Data as people have it: every kind of file, every shape of rows, and columns with names of their own."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tandem.data.load import load_rows
from tandem.data.preference_pairs import load_pairs
from tandem.errors import DataError
from tandem.spec.data import FileData
from tandem.spec.load import load_spec

ROWS = [{"prompt": f"question {i}", "completion": f"answer, {i}\nand more"} for i in range(12)]


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def as_named_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"version": 2, "data": rows}))


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_csv(delimiter: str) -> Callable[[Path, list[dict[str, Any]]], None]:
    def write(path: Path, rows: list[dict[str, Any]]) -> None:
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)

    return write


FILES = [
    ("a.jsonl", as_jsonl),
    ("a.ndjson", as_jsonl),
    ("a.json", as_json),
    ("b.json", as_jsonl),  # many files named .json are JSON Lines
    ("c.json", as_named_json),
    ("a.csv", as_csv(",")),
    ("b.csv", as_csv(";")),
    ("a.tsv", as_csv("\t")),
    ("A.CSV", as_csv(",")),
    ("a.parquet", as_parquet),
]


@pytest.mark.parametrize(("name", "write"), FILES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(FILES)])
def test_every_kind_of_file_gives_the_same_conversations(tmp_path: Path, name: str, write: Any):
    write(tmp_path / name, ROWS)
    split = load_rows(FileData(path=str(tmp_path / name), eval_share=0))
    assert [[each["content"] for each in row.messages] for row in split.train] == [list(row.values()) for row in ROWS]
    assert split.report.text() == "12 rows read as prompt and completion, 12 used, 0 left out"


def test_a_row_of_a_csv_is_numbered_by_its_line(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"two\nlines",x\n\nshort\nq,a\n')
    with pytest.raises(DataError, match=r"1 x 1 cells, where the first line names 2 columns \(.*a\.csv:5\)"):
        load_rows(FileData(path=str(path)))


def test_a_cell_may_be_longer_than_the_csv_module_allows(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,completion\n{'x' * 200_000},a\n")
    (row,) = load_rows(FileData(path=str(path), eval_share=0)).train
    assert len(row.messages[0]["content"]) == 200_000


WRONG = [
    ("a.csv", b"", "is empty; its first line names the columns"),
    ("a.csv", b"a,a\n1,2\n", "its first line must name each column once"),
    ("a.csv", b"prompt,completion\ncaf\xe9,x\n", "is not UTF-8 .*iconv"),
    ("a.json", b"{", "is neither JSON nor JSON Lines"),
    ("a.json", b'{"rows": [], "more": []}', "holds dict with 2 lists; write a list of rows"),
    ("a.json", b"5", "holds int with 0 lists; write a list of rows"),
]


@pytest.mark.parametrize(("name", "content", "said"), WRONG, ids=[said[:30] for _, _, said in WRONG])
def test_a_wrong_file_is_refused_in_one_sentence_with_its_field(tmp_path: Path, name: str, content: bytes, said: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.path = '.*{name}': {said}") as refused:
        load_rows(FileData(path=str(tmp_path / name)))
    assert "\n" not in str(refused.value)


def test_a_directory_is_sent_to_the_other_field(tmp_path: Path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(DataError, match=r"data\.path = '.*a\.csv': is a directory; name = .* reads its data files"):
        load_rows(FileData(path=str(tmp_path / "a.csv")))


def test_columns_are_mapped_and_texts_are_filled_in(tmp_path: Path):
    rows = [{"id": 7, "text": "It is broken", "team": "repairs", "messages": "none", "note": None}] * 9
    as_jsonl(tmp_path / "a.jsonl", rows)
    columns = {"prompt": "Which team? {text}{note}", "completion": "team"}
    split = load_rows(FileData(path=str(tmp_path / "a.jsonl"), columns=columns, eval_share=0))
    assert split.train[0].messages == (
        {"role": "user", "content": "Which team? It is broken"},
        {"role": "assistant", "content": "repairs"},
    )


def test_mapped_columns_are_read_from_parquet_too(tmp_path: Path):
    as_parquet(tmp_path / "a.parquet", [{"q": "hi", "a": "hello", "junk": 1}] * 4)
    path = str(tmp_path / "a.parquet")
    split = load_rows(FileData(path=path, columns={"prompt": "q", "completion": "{a}!"}, eval_share=0))
    assert split.train[0].messages[1]["content"] == "hello!"


def test_pairs_are_mapped_too(tmp_path: Path):
    as_csv(",")(tmp_path / "a.csv", [{"q": "hi", "good": "hello", "bad": "what"}] * 4)
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    split = load_pairs(FileData(path=str(tmp_path / "a.csv"), columns=columns, eval_share=0))
    assert split.train[0].chosen == ({"role": "assistant", "content": "hello"},)
    assert split.report.text().startswith("4 rows read as prompt, chosen and rejected, 4 used")


COLUMNS = [
    ({}, r"no conversation in its columns \(q, a\) .*\n.*as in data\.columns = \{ prompt = "),
    ({"prompt": "question", "completion": "a"}, r"no column 'question' \(columns\.prompt\); its columns: q, a"),
    ({"q": "prompt"}, r'data\.columns\.q = "prompt": unknown; write prompt = "q"; Known: messages'),
    ({"promt": "q"}, r'data\.columns\.promt = "q": unknown; did you mean \'prompt\'\? Known: messages'),
]


@pytest.mark.parametrize(("columns", "said"), COLUMNS, ids=[str(columns) for columns, _ in COLUMNS])
def test_wrong_columns_are_named_beside_those_of_the_file(tmp_path: Path, columns: dict[str, str], said: str):
    as_csv(",")(tmp_path / "a.csv", [{"q": "hi", "a": "hello"}] * 4)
    with pytest.raises(DataError, match=said):
        load_rows(FileData(path=str(tmp_path / "a.csv"), columns=columns))


def test_each_shape_is_counted(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    alpaca = {"instruction": "Add.", "input": "1 1", "output": "2"}
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hey"}]}
    as_jsonl(tmp_path / "a.jsonl", [chat, alpaca, shared, {**alpaca, "output": "3"}])
    told = load_rows(FileData(path=str(tmp_path / "a.jsonl"))).report.text()
    assert told == "4 rows read as Alpaca (2), chats (1), ShareGPT (1), 4 used, 0 left out"


def test_data_is_looked_for_beside_the_spec_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "spec").mkdir()
    as_jsonl(tmp_path / "here" / "b.jsonl", ROWS)
    as_jsonl(tmp_path / "spec" / "a.jsonl", ROWS)
    written = 'recipe = "sft"\nmodel.preset = "tiny"\n[data]\npath = "a.jsonl"\neval_path = "b.jsonl"\n'
    (tmp_path / "spec" / "mine.toml").write_text(written + "[train]\nsteps = 1\nlr = 1e-3\n")
    monkeypatch.chdir(tmp_path / "here")
    data = load_spec(tmp_path / "spec" / "mine.toml").data
    assert (data.path, data.eval_path) == (str(tmp_path / "spec" / "a.jsonl"), "b.jsonl")
    assert data.in_place().eval_path == str(tmp_path / "here" / "b.jsonl")
