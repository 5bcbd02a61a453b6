"""What an answer is compared with, as far as a task says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.env.expected import Expected, expected_of
from tandem.env.load import load_environment
from tandem.types import Task

ROWS = "question,answer,level\n" + "".join(f"What is {each} + 4?,{each + 4},easy\n" for each in range(4))
SCORES = {
    "reply, answer": ("answer",),
    "reply, level": ("level",),
    "reply, row": (),
    "completions, answer, **kwargs": ("answer",),
}


def test_a_payload_s_own_answer_is_found_by_its_name_and_else_every_plain_entry():
    named = Task("a", (), {"word": "waltz", "answer": "altwz"})
    assert expected_of(named).answers() == {"answer": "altwz"}
    assert expected_of(Task("b", (), {"city": "Lima", "rows": [1]})).answers() == {"city": "Lima"}
    assert expected_of(Task("c", (), {"part": 3, "task": named})).answers() == {"answer": "altwz"}, "of a mix"
    assert expected_of(Task("d", ())).answers() == {}


@pytest.mark.parametrize("parameters", SCORES)
def test_prompts_say_which_columns_their_functions_read(tmp_path: Path, parameters: str):
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "score.py").write_text(f"def score({parameters}):\n    return 0.0\n")
    params = {"data": str(tmp_path / "rows.csv"), "reward": f"{tmp_path / 'score.py'}:score"}
    expected = expected_of(load_environment("prompts", params).tasks("train")[0])
    assert expected.texts().keys() == {"question", "answer", "level"}
    assert tuple(name for name in expected.read if name in expected.columns) == SCORES[parameters]
    assert (*expected.answers(),) == (SCORES[parameters] or ("answer",))


def test_a_ready_reward_reads_the_column_that_it_is_told(tmp_path: Path):
    (tmp_path / "rows.csv").write_text(ROWS)
    params = {"data": str(tmp_path / "rows.csv"), "reward": {"fn": "exact", "answer": "level"}}
    assert (*expected_of(load_environment("prompts", params).tasks("train")[0]).answers(),) == ("level",)


def test_texts_are_short_and_can_be_sent_as_json():
    texts = Expected({"answer": "x" * 5000, "half": "\ud800", **{str(each): each for each in range(99)}}).texts()
    assert len(texts["answer"]) == 200
    assert texts["half"].encode()
    assert len(texts) == 16
