"""Thoughts over HTTP: apart from the answer in a chat, in the text of a completion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import MODEL, ScriptedEngine, Served, serving

from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def thinking(tmp_path: Path) -> Iterator[Served]:
    renderer = Renderer(byte_tokenizer(), thinking=True)
    with serving(ScriptedEngine(renderer), renderer, tmp_path) as served:
        yield served


@pytest.mark.parametrize(
    ("script", "thought", "answer"),
    [("6*7</think>\n42", "6*7", "42"), ("6*7", "6*7", ""), ("6 </th", "6 </th", ""), ("</think>42", "", "42")],
)
def test_a_chat_has_the_thought_apart_from_the_answer(thinking: Served, script: str, thought: str, answer: str) -> None:
    thinking.engine.script = script
    with thinking.openai() as client:
        message: Any = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message  # pyright: ignore
        deltas: list[Any] = [
            choice.delta
            for chunk in client.chat.completions.create(model=MODEL, messages=HI, stream=True)  # pyright: ignore
            for choice in chunk.choices
        ]
    assert (getattr(message, "reasoning_content", ""), message.content) == (thought, answer)
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content for delta in deltas) == answer
    if "<" not in thought and thought:
        assert max(len(getattr(delta, "reasoning_content", "")) for delta in deltas) == 1, "letter by letter"


def test_a_completion_is_the_text_as_it_is(thinking: Served) -> None:
    thinking.engine.script = "6*7</think>\n42"
    with thinking.openai() as client:
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=50).choices[0].text == "6*7</think>\n42"
