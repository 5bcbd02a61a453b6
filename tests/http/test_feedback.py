"""Thumbs for chat completions by their id: kept with the chat, and read as rows to train on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from served import MODEL, ScriptedEngine, Served, serving
from typer.testing import CliRunner

import tandem
from tandem.cli.main import app
from tandem.data.conversation import parse_row
from tandem.data.preference_pairs import parse_pair
from tandem.errors import RunError, StoreFull
from tandem.io.chat_feedback import ChatStore, count_feedback, feedback_rows
from tandem.text.renderer import Renderer

HI: list[Any] = [{"role": "user", "content": "Is it late?"}]


@pytest.fixture
def rated(renderer: Renderer, tmp_path: Path) -> Iterator[Served]:
    with serving(ScriptedEngine(renderer), renderer, tmp_path, chats=ChatStore(tmp_path)) as served:
        yield served


def chat(served: Served, says: str, messages: Sequence[Any] = HI, **options: Any) -> Any:
    served.engine.script = says
    with served.openai() as client:
        return client.chat.completions.create(model=MODEL, messages=[*messages], **options)


def rate(served: Served, id: str, value: float, **more: Any) -> Any:
    with served.openai() as client:
        body = {"id": id, "value": value, **more}
        return client.post("/feedback", cast_to=object, body=body)


def test_a_thumb_and_a_better_answer_are_rows_to_train_on(rated: Served, tmp_path: Path) -> None:
    answer = chat(rated, "I cannot know.")
    told = rate(rated, answer.id, False, better="Ten past nine.")
    assert told == {"id": answer.id, "choice": 0, "value": 0.0, "weight_version": 3}
    (pair,) = feedback_rows(tmp_path)
    prompt, chosen, rejected = parse_pair(pair)
    assert [each["content"] for each in (*prompt, *chosen, *rejected)] == [
        "Is it late?", "Ten past nine.", "I cannot know.",
    ]  # fmt: skip
    (demonstration,) = feedback_rows(tmp_path, "sft")
    assert [each["content"] for each in parse_row(demonstration)] == ["Is it late?", "Ten past nine."]
    labels = feedback_rows(tmp_path, "labels")
    assert [(row["completion"][0]["content"], row["label"]) for row in labels] == [
        ("I cannot know.", False), ("Ten past nine.", True),
    ]  # fmt: skip


def test_the_last_thumb_of_an_answer_counts(rated: Served, tmp_path: Path) -> None:
    answer = chat(rated, "Yes.")
    for value in (False, True, True):
        rate(rated, answer.id, value)
    assert [row["label"] for row in feedback_rows(tmp_path, "labels")] == [True]
    assert count_feedback(tmp_path) == {"chats": 1, "rated": 1, "better": 0}


def test_good_and_bad_answers_to_the_same_messages_are_pairs(rated: Served, tmp_path: Path) -> None:
    for says, value in (("Ten.", 1), ("No.", 0), ("Why?", 0), ("No.", 0)):
        rate(rated, chat(rated, says).id, value)
    rate(rated, chat(rated, "Alone.", [{"role": "user", "content": "another"}]).id, 1)
    pairs = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in feedback_rows(tmp_path)]
    assert pairs == [("Ten.", "No."), ("Ten.", "Why?"), ("Ten.", "No.")]


def test_each_of_several_answers_has_its_own_thumb(rated: Served, tmp_path: Path) -> None:
    answer = chat(rated, "a", n=2)
    rate(rated, answer.id, True, choice=1)
    with pytest.raises(openai.BadRequestError) as refused:
        rate(rated, answer.id, True, choice=2)
    assert "the chat has 2 answers" in str(refused.value)
    assert count_feedback(tmp_path)["rated"] == 1


def test_a_streamed_chat_is_known_before_its_last_chunk(rated: Served, tmp_path: Path) -> None:
    rated.engine.script = "abc"
    with rated.openai() as client:
        for chunk in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
            if chunk.choices and chunk.choices[0].finish_reason:
                rate(rated, chunk.id, True)
                break
    assert feedback_rows(tmp_path, "sft")[0]["messages"][-1] == {"role": "assistant", "content": "abc"}


def test_chats_and_thumbs_survive_a_restart(renderer: Renderer, tmp_path: Path) -> None:
    with serving(ScriptedEngine(renderer), renderer, tmp_path, chats=ChatStore(tmp_path)) as served:
        first, second = chat(served, "one").id, chat(served, "two").id
        rate(served, first, True)
    with serving(ScriptedEngine(renderer), renderer, tmp_path, chats=ChatStore(tmp_path)) as served:
        rate(served, second, False)
    assert [row["label"] for row in feedback_rows(tmp_path, "labels")] == [True, False]


def test_what_cannot_be_rated_is_said(rated: Served, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no chat 'chatcmpl-x'"):
        rate(rated, "chatcmpl-x", True)
    unkept = chat(rated, "secret", store=False)
    with pytest.raises(openai.NotFoundError, match="there is no chat"):
        rate(rated, unkept.id, True)
    with pytest.raises(openai.NotFoundError, match="start `tandem serve` or `tandem deploy` with --feedback"):
        rate(served, "chatcmpl-x", True)
    with pytest.raises(openai.BadRequestError, match="store = true"):
        chat(served, "", store=True)


@pytest.mark.parametrize("value", ["up", None, [1], 1e300])
def test_a_value_is_a_thumb_or_a_number(rated: Served, value: Any) -> None:
    answer = rated.post({"id": "x", "value": value}, "/v1/feedback")
    assert answer.status_code == 400
    assert answer.json()["error"]["field"].startswith("value")


def test_the_client_gets_its_answer_when_the_disk_is_full(rated: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(ChatStore, "keep", full)
    assert chat(rated, "all the same").choices[0].message.content == "all the same"
    with rated.http() as client:
        assert "tandem_chats_not_kept_total 1.0" in client.get("/metrics").text


def test_unrated_chats_go_first_when_the_room_is_used(tmp_path: Path) -> None:
    async def fill() -> None:
        store = ChatStore(tmp_path, max_bytes=5_000)
        for number in range(40):
            await store.keep(f"c{number}", HI, [{"role": "assistant", "content": str(number)}], 0)
            if number in (2, 30):
                assert await store.rate(f"c{number}", 0, 1.0, "") == (1, 0)
        assert await store.rate("c3", 0, 1.0, "") is None
        store.close()

    asyncio.run(fill())
    assert 10 < count_feedback(tmp_path)["chats"] < 20
    assert [row["messages"][-1]["content"] for row in feedback_rows(tmp_path, "sft")] == ["2", "30"]


def test_stars_need_a_limit_and_tools_and_empty_answers_are_left_out(tmp_path: Path) -> None:
    async def fill() -> None:
        store = ChatStore(tmp_path)
        for number, (text, stars) in enumerate((("a", 5), ("b", 4), ("c", 2), ("tool", 5), ("", 5))):
            await store.keep(str(number), HI, [{"role": "assistant", "content": text}], 0, tools=text == "tool")
            await store.rate(str(number), 0, float(stars), "")
        store.close()

    asyncio.run(fill())
    with pytest.raises(RunError, match="ratings go up to 5; say from which value"):
        feedback_rows(tmp_path, "labels")
    assert [row["label"] for row in feedback_rows(tmp_path, "labels", good_from=4)] == [True, True, False]
    assert [row["messages"][-1]["content"] for row in feedback_rows(tmp_path, "sft", good_from=4)] == ["a", "b"]


def test_the_command_writes_a_file_that_a_spec_can_name(rated: Served, tmp_path: Path) -> None:
    for says, value in (("Ten.", 1), ("No.", 0)):
        rate(rated, chat(rated, says).id, value)
    file = tmp_path / "pairs.jsonl"
    done = CliRunner().invoke(app, ["feedback", str(tmp_path), "--as", "pairs", "--out", str(file)])
    assert done.output == f"2 chats, 2 rated, 0 with a better answer\n1 rows as pairs in {file}\n"
    assert [json.loads(line) for line in file.read_text().splitlines()] == tandem.feedback_rows(tmp_path)
    with pytest.raises(RunError, match="has no feedback/"):
        feedback_rows(tmp_path / "elsewhere")
