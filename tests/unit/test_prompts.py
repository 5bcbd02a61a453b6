"""The environment `prompts`: which column is the prompt, how reward functions are called, and what is refused."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import datasets
import pytest

from tandem.env.human_player import HumanChat, try_environment
from tandem.env.load import load_environment
from tandem.env.protocol_check import report_of
from tandem.errors import DataError, EpisodeFailed, SpecError
from tandem.spec.load import load_spec, parse_spec, to_toml
from tandem.types import Outcome

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n), "note": None} for n in range(40)]
SCORE = """
import asyncio
loaded = []

def correct(reply, answer):
    return reply == answer

async def later(reply, *, row, prompt, messages, scale=1.0):
    await asyncio.sleep(0)
    assert prompt == row["question"] and messages[-1]["content"] == prompt
    return scale * len(reply)

def trl(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["note"]) == 1
    loaded.append((prompts, completions))
    return [1.0 if said == right else -1.0 for said, right in zip(completions, answer)]

async def trl_async(completions, **kwargs):
    return [float(len(said)) for said in completions]

def chats(completions):
    return [float(said[0]["role"] == "assistant" and said[0]["content"] == "4") for said in completions]

def not_here(completions):
    return [None for _ in completions]

def asked(reply, judge):
    return judge(reply)

class Stern:
    def __call__(self, reply):
        return -1
stern = Stern()

def broken(reply):
    return {}["missing"]
def wordy(reply):
    return "good"
def nan(reply):
    return float("nan")
def several(completions):
    return [1.0, 2.0]
def plain(completions):
    return 1.0
def ids(completions, completion_ids):
    return [0.0]
def wants(reply, colour):
    return 0.0
def nothing():
    return 0.0
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "score.py").write_text(SCORE)
    return tmp_path


def played(params: dict[str, Any], reply: str, task: int = 0, judged: str = "") -> Outcome:
    environment = load_environment("prompts", {"data": "q.jsonl", **params})
    answers = iter([reply, judged])
    chat = HumanChat(lambda _: next(answers), lambda _: None)
    return asyncio.run(environment.run(environment.tasks("train")[task], chat))


def right(params: dict[str, Any]) -> str:
    return load_environment("prompts", {"data": "q.jsonl", **params}).tasks("train")[0].payload["row"].columns["answer"]


def test_the_reward_is_the_weighted_sum_and_each_function_is_a_metric(place: Path):
    reward = ["score.py:correct", {"fn": "score.py:later", "weight": 0.5, "name": "long", "scale": 2.0}, "score.py:trl"]
    outcome = played({"reward": reward}, right({"reward": reward}) + "")
    length = len(right({"reward": reward}))
    assert outcome.metrics == {"correct": 1.0, "long": 2.0 * length, "trl": 1.0}
    assert outcome.reward == 1.0 + length + 1.0


@pytest.mark.parametrize(
    ("fn", "reward"),
    [("correct", 0.0), ("trl", -1.0), ("trl_async", 3.0), ("later", 3.0), ("stern", -1.0), ("not_here", 0.0)],
)
def test_every_form_of_function_is_called_as_it_expects(place: Path, fn: str, reward: float):
    outcome = played({"reward": f"score.py:{fn}"}, "xyz")
    assert outcome.reward == reward
    assert outcome.metrics == ({} if fn == "not_here" else {fn: reward})


def test_completions_are_messages_where_the_prompt_is(place: Path):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    (place / "chats.jsonl").write_text("".join(json.dumps({"prompt": chat, "id": n}) + "\n" for n in range(1)) * 8)
    with pytest.raises(SpecError, match=r"tasks\('eval'\) is empty"):  # one prompt only
        load_environment("prompts", {"data": "chats.jsonl", "reward": "score.py:chats"})
    rows = [{"prompt": [chat[0], {"role": "user", "content": f"2 + {n}?"}]} for n in range(20)]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert played({"data": "chats.jsonl", "reward": "score.py:chats"}, "4").reward == 1.0


def test_a_function_may_ask_the_judge(place: Path):
    outcome = played({"reward": {"fn": "judge", "question": "Mark {reply} for {prompt}"}}, "x", judged="7 of it")
    assert outcome.metrics == {"judge": 0.7}


FAILS = [
    ("broken", "raised", r":broken' raised KeyError: 'missing' \(.*score\.py:\d+\); q\.jsonl:\d+, the answer 'x'"),
    ("wordy", "not_a_number", r"reward 'score\.py:wordy' returned 'good'; return a finite number"),
    ("nan", "not_a_number", r"reward 'score\.py:nan' returned nan; return a finite number"),
    ("several", "not_a_number", r"returned \[1\.0, 2\.0\]; with `completions` it returns a list, one number"),
    ("plain", "not_a_number", r"returned 1\.0; with `completions` it returns a list, one number"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "kind", "said"), FAILS, ids=[fn for fn, _, _ in FAILS])
def test_a_failing_function_is_named_with_its_row_and_the_answer(place: Path, fn: str, kind: str, said: str):
    with pytest.raises(EpisodeFailed, match=said) as failed:
        played({"reward": f"score.py:{fn}"}, "x")
    assert failed.value.kind == kind


REFUSED = [
    ({"reward": "score.py"}, r"= 'score\.py': name a function of it; its functions: score\.py:correct"),
    ({"reward": "score.py:corect"}, r"'score\.py:corect': no function 'corect' in it; its functions: score\.py:corr"),
    ({"reward": "none.py:f"}, r"'none\.py:f': no such file, neither beside the spec nor in"),
    ({"reward": "lastnumber"}, r"'lastnumber': unknown; ready ones: last_number"),
    ({"reward": "accuracy_reward"}, r"unknown; write \{ fn = \"maths\", answer = \"solution\" \}; ready ones"),
    ({"reward": []}, r"name at least one function"),
    ({"reward": ["score.py:nan", "score.py:nan"]}, r"two are called 'nan'; give one another name"),
    ({"reward": {"weight": 2}}, r"a table names its function as fn"),
    ({"reward": {"fn": "score.py:nan", "weight": "2"}}, r"weight = '2' of 'score\.py:nan': must be a number"),
    ({"reward": {"fn": "score.py:correct", "size": 2}}, r"size = 2: 'score\.py:correct' has no such parameter; it"),
    ({"reward": "score.py:ids"}, r"'score\.py:ids': asks for completion_ids; there is completions, prompts, question"),
    ({"reward": "score.py:wants"}, r"asks for colour; there is prompt, messages, row, judge, question, answer, note"),
    ({"reward": "score.py:nothing"}, r"takes no argument; its first one is the reply"),
    ({"reward": {"fn": "last_number", "answer": "gold"}}, r"no column 'gold'; .*answer = \"answer\" }; the columns"),
    ({"reward": {"fn": "length"}}, r"'length': needs most"),
    ({"reward": {"fn": "length", "most": "9"}}, r"most = '9' of 'length': must be a whole number"),
    ({"reward": {"fn": "length", "moist": 9}}, r"moist = 9: unknown to 'length'; Known: most, least, unit"),
    ({"reward": {"fn": "regex", "pattern": "("}}, r"pattern = '\(' of 'regex': is no regular expression"),
    ({"reward": "score.py:nan", "data": {"pth": "q.jsonl"}}, r"params\.data = .*: add path, for a file, or name"),
    ({"reward": "score.py:nan", "data": {"path": "q.xls"}}, r"params\.data\.path = 'q\.xls': must be a file"),
    ({"reward": "score.py:nan", "data": {"path": "q.jsonl", "max_tokens": 5}}, r"max_tokens = 5: has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "said"), REFUSED, ids=[str(params)[:60] for params, _ in REFUSED])
def test_a_wrong_table_is_refused_before_anything_runs(place: Path, params: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        load_environment("prompts", {"data": "q.jsonl", **params})


def test_rows_without_a_prompt_are_named_with_the_columns_that_there_are(place: Path):
    (place / "odd.csv").write_text("titel,antwort\na,b\n")
    with pytest.raises(DataError) as refused:
        load_environment("prompts", {"data": "odd.csv", "reward": "score.py:nan"})
    assert "1 x no prompt in its columns (titel, antwort) (odd.csv:2)" in str(refused.value)
    assert 'say which column holds what, as in environment.params.data.columns = { prompt = "question" }' in str(
        refused.value
    )


PROMPTS = [
    ({"prompt": "a", "question": "b"}, "a"),
    ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n\n1 1"),
    ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}, "hi"),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, "hi"),
    ({"problem": "p", "text": "t"}, "p"),
    ({"text": "t"}, "t"),
]


@pytest.mark.parametrize(("row", "prompt"), PROMPTS, ids=[next(iter(row)) for row, _ in PROMPTS])
def test_the_prompt_is_found_in_data_of_many_shapes(place: Path, row: dict[str, Any], prompt: str):
    (place / "a.jsonl").write_text((json.dumps(row) + "\n") + json.dumps({"prompt": "held out?"}))
    environment = load_environment("prompts", {"data": "a.jsonl", "reward": "score.py:stern", "system": "Be brief."})
    tasks = [*environment.tasks("train"), *environment.tasks("eval")]
    found = [[each["content"] for each in task.messages] for task in tasks]
    assert ["Be brief.", prompt] in found
    assert {task.payload["row"].columns.get("completion") for task in tasks} <= {None, "hello"}


def test_the_last_turn_of_a_recorded_chat_warms_up(place: Path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "hello"}]} for n in range(9)
    ]
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment: Any = load_environment("prompts", {"data": "a.jsonl", "reward": "score.py:stern"})
    assert environment.demonstrate(environment.tasks("train")[0], None) == [{"role": "assistant", "content": "hello"}]
    without: Any = load_environment("prompts", {"data": "q.jsonl", "reward": "score.py:stern"})
    with pytest.raises(SpecError, match=r"q\.jsonl:\d+ has no text in a column completion; map"):
        without.demonstrate(without.tasks("train")[0], None)


def test_the_tasks_are_split_like_any_data_and_the_report_says_how_they_were_read(place: Path):
    environment: Any = load_environment(
        "prompts", {"data": {"path": "q.jsonl", "eval_share": 0.25}, "reward": "last_number"}
    )
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (30, 10)
    assert environment.report == "40 rows read as prompts (column question), 40 used, 0 left out"


def test_a_directory_is_a_data_set_whose_split_is_held_out(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    (place / "set").mkdir()
    for name, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        (place / "set" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = load_environment("prompts", {"data": {"name": "set", "eval_split": "test"}, "reward": "last_number"})
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (30, 10)
    assert environment.tasks("eval")[0].payload["row"].columns["answer"] == "60"


def test_only_a_text_is_taken_for_a_report(place: Path):
    environment: Any = load_environment("sort")
    assert report_of(environment) == ""
    assert report_of(type("Mine", (), {"report": lambda self: "mine"})()) == ""  # type: ignore[arg-type]


SPEC = """
recipe = "rl"
model.preset = "tiny"
environment.name = "prompts"
environment.params.data = { path = "q.jsonl" }
environment.params.reward = ["score.py:correct", { fn = "score.py:trl", weight = 0.5 }, "last_number"]
train = { steps = 1, lr = 1e-4, groups_per_step = 4, group_size = 4 }
"""


def test_files_are_found_beside_the_spec_and_workers_play_them(place: Path, monkeypatch: pytest.MonkeyPatch):
    (place / "mine.toml").write_text(SPEC)
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    environment = load_spec("../mine.toml").environment
    assert environment is not None
    assert environment.workers == 16
    assert environment.params == {
        "data": {"path": str(place / "q.jsonl")},
        "reward": [f"{place}/score.py:correct", {"fn": f"{place}/score.py:trl", "weight": 0.5}, "last_number"],
    }
    assert parse_spec(tomllib.loads(to_toml(load_spec("../mine.toml")))).environment == environment
    assert load_spec("../mine.toml", ["environment.workers=0"]).environment.workers == 0
    assert load_spec("../mine.toml", ["train.group_size=99"]).environment.workers == 16


def test_paths_become_absolute_before_a_run_so_that_it_resumes_anywhere(place: Path):
    here = parse_spec(tomllib.loads(SPEC)).in_place().environment
    assert here.params["data"] == {"path": str(place / "q.jsonl")}
    assert here.params["reward"][0] == f"{place}/score.py:correct"


def test_a_prompt_is_tried_in_the_terminal(place: Path):
    told: list[str] = []
    params = {"data": "q.jsonl", "reward": ["last_number"]}
    asked = right(params)
    outcome = try_environment("prompts", params, split="train", ask=lambda _: f"It is {asked}.", tell=told.append)
    assert outcome.reward == 1.0
    assert told[-1].split() == ["reward>", "1", "last_number", "1", "correct", "1"]
