"""`tandem chat NAME`: what is sent to the control server, and what the terminal shows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tandem.serve.deployment_chat import DeploymentConversation
from tandem.serve.terminal_chat import converse


def events(*texts: str, end: str = "stop", thoughts: tuple[str, ...] = ()) -> httpx.Response:
    deltas = [*({"reasoning_content": each} for each in thoughts), *({"content": text} for text in texts)]
    rows: list[dict[str, Any]] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    if end:
        rows.append({"choices": [{"delta": {}, "finish_reason": end}]})
    lines = [f"data: {json.dumps(row)}\n\n" for row in rows]
    head = {"content-type": "text/event-stream", "x-tandem-revision": "support@1"}
    return httpx.Response(200, headers=head, content="".join([*lines, "data: [DONE]\n\n"]).encode())


def refused(status: int, text: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"error": {"code": "x", "message": text}})


def talk(answers: list[httpx.Response], said: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return what the terminal shows and the bodies that were sent."""
    shown, sent, lines = list[str](), list[dict[str, Any]](), iter([*said, "/exit"])

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return answers.pop(0)

    async def play() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here") as http:
            conversation = DeploymentConversation(http, {"model": "support", "stream": True}, "be brief")
            await converse(conversation, lambda _: next(lines), shown.append)

    asyncio.run(play())
    return "".join(shown), sent


def test_each_turn_goes_on_with_the_last_and_the_revision_is_named_once():
    shown, sent = talk(
        [events("hel", "lo"), events("fine", end="length"), events("new")], ["hi", "and?", "/reset", "x"]
    )
    assert "(support@1)\nhello\n" in shown
    assert shown.count("(support@1)") == 1
    assert "fine\n(cut at max_tokens)\n" in shown
    system = {"role": "system", "content": "be brief"}
    assert sent[1]["messages"] == [
        system, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    assert sent[2]["messages"] == [system, {"role": "user", "content": "x"}]
    assert sent[0]["model"] == "support"


def test_thoughts_are_shown_apart_and_are_no_part_of_the_answer():
    shown, sent = talk([events("4", "2", thoughts=("is it", " 6 x 7?")), events("yes")], ["what?", "sure?"])
    assert "<think>is it 6 x 7?</think>42\n" in shown
    assert "<think>" not in shown.partition("</think>")[2]
    assert sent[1]["messages"][2] == {"role": "assistant", "content": "42"}


def test_a_model_that_is_being_started_is_waited_for():
    shown, sent = talk([refused(503, "it is being started", **{"retry-after": "0"}), events("here")], ["hi"])
    assert "(it is being started; waiting)\n(support@1)\nhere\n" in shown
    assert len(sent) == 2


def test_a_turn_that_fails_is_forgotten_and_said():
    failed = events("ha", end="")
    shown, sent = talk([failed, refused(404, "there is no deployment 'support'"), events("ok")], ["a", "b", "c"])
    assert "(the answer broke off; this turn is forgotten)" in shown
    assert "(there is no deployment 'support'; this turn is forgotten)" in shown
    assert [each["content"] for each in sent[2]["messages"]] == ["be brief", "c"]
