import pytest

from tandem.errors import RunError
from tandem.io.jsonl import JsonlWriter, append_jsonl, read_jsonl


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    first, second = {"step": 1, "text": "zwei\nZeilen \u2028"}, {"step": 2, "nested": {"list": [1, 2.5, None]}}
    append_jsonl(path, first)
    with JsonlWriter(path) as writer:
        writer.write(second)
    assert read_jsonl(path) == [first, second]


def test_what_is_not_a_number_is_written_as_null(tmp_path):
    append_jsonl(tmp_path / "m.jsonl", {"loss": float("nan"), "grad": [float("inf"), 1.0], "ok": {"x": float("-inf")}})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"loss": None, "grad": [None, 1.0], "ok": {"x": None}}]


def test_a_torn_last_line_is_left_out_and_the_next_writer_cuts_it_off(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "te\xc3')
    assert read_jsonl(path) == [{"step": 1}]
    append_jsonl(path, {"step": 3})
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]


def test_no_file_is_no_rows_and_damage_in_the_middle_names_its_line(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_jsonl(path) == []
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"m\.jsonl:2 is not JSON"):
        read_jsonl(path)
