"""A stream parts thought and answer as the whole text is parted, wherever it is cut."""

from __future__ import annotations

import random

import pytest

from tandem.text.renderer import Renderer
from tandem.text.thinking_stream import ThoughtStream
from tandem.text.tokenizer import byte_tokenizer

SAID = [
    # opened by the prompt, text, thought, answer
    (True, "6*7</think>\n\n42", "6*7", "42"),
    (True, "</think>42", "", "42"),
    (True, "6*7 </thi nk", "6*7 </thi nk", ""),
    (True, "6*7</think", "6*7</think", ""),
    (True, "a</think>b</think>c", "a", "b</think>c"),
    (True, "", "", ""),
    (False, "<think>a</think>\n 42 ", "a", "42 "),
    (False, "\n <think>a", "a", ""),
    (False, "42 <think>a</think>", "", "42 <think>a</think>"),
    (False, " <thin", "", " <thin"),
    (False, " 42", "", " 42"),
    (False, "<", "", "<"),
]


@pytest.mark.parametrize(("opened", "text", "thought", "answer"), SAID)
def test_every_way_of_cutting_gives_the_same(opened: bool, text: str, thought: str, answer: str):
    rng = random.Random(text)
    for pieces in (1, 2, 3, 5, 40):
        for _ in range(20):
            cuts = sorted(rng.randint(0, len(text)) for _ in range(pieces - 1))
            stream = ThoughtStream(opened=opened)
            told = [stream.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            told.append(stream.close())
            assert tuple(map("".join, zip(*told, strict=True))) == (thought, answer)


@pytest.mark.parametrize(("opened", "text", "thought", "answer"), [each for each in SAID if each[1].strip()])
def test_the_answer_is_what_an_environment_sees(opened: bool, text: str, thought: str, answer: str):
    renderer = Renderer(byte_tokenizer(), thinking=opened)
    assert renderer.visible(renderer.encode(text)) == answer


def test_what_is_sure_is_not_held_back():
    stream = ThoughtStream(opened=True)
    assert stream.push("so 6*7 <") == ("so 6*7 ", "")
    assert stream.push("b> is") == ("<b> is", "")
    assert stream.push("</think> ") == ("", "")
    assert stream.push(" 4") == ("", "4")
    assert stream.push(" 2") == ("", " 2")
