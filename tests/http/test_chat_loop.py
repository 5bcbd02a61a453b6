from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from served import MODEL, ScriptedEngine, serving

from families.family_images import TOKENIZER
from tandem.serve.terminal_chat import HELP, chat_loop
from tandem.text.renderer import Renderer
from tandem.types import Completion, Sampling


class Recorder:
    """Passes requests on to an engine and keeps what was asked and answered."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.turns: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        completion = await self.engine.generate(prompt_ids, sampling, **options)
        self.turns.append((list(prompt_ids), completion))
        return completion


def talk(engine: Any, renderer: Renderer, said: list[Any], **options: Any) -> str:
    """What the terminal shows; an exception in `said` is raised where input would wait."""
    shown: list[str] = []
    lines = iter(said)

    def ask(_: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    asyncio.run(chat_loop(engine, renderer, context=256, ask=ask, tell=shown.append, **options))
    return "".join(shown)


def test_every_turn_follows_the_ids_that_were_sampled(make_engine: Any, renderer: Renderer) -> None:
    """The random model's turns are cut by length and full of invalid text: rendering them again would change them."""
    engine = Recorder(make_engine())
    shown = talk(engine, renderer, ["hello", "and then?", "/exit"], sampling=Sampling(20, seed=1), system="be brief")
    (first, answer), (second, _) = engine.turns
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert first == renderer.prompt(messages)
    glue = renderer.glue([{"role": "user", "content": "and then?"}], answer.ids[-1])
    assert second == first + answer.ids + glue
    assert renderer.visible(answer.ids) in shown


def test_reset_forgets_and_the_end_of_input_leaves(renderer: Renderer) -> None:
    engine = Recorder(ScriptedEngine(renderer))
    engine.engine.script = "né🦊"
    shown = talk(engine, renderer, ["one", "/reset", "two", "", "/what", EOFError()])
    assert engine.turns[1][0] == renderer.prompt([{"role": "user", "content": "two"}])
    assert shown == f"{HELP}né🦊\n(forgotten)\nné🦊\n{HELP}\n"


def test_ctrl_c_at_the_prompt_leaves(renderer: Renderer) -> None:
    assert talk(ScriptedEngine(renderer), renderer, [KeyboardInterrupt()]) == f"{HELP}\n"


def test_ctrl_c_during_an_answer_stops_it_and_forgets_the_turn(renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer)
    engine.script, engine.waits_at = "x" * 50, 3
    recorder, shown = Recorder(engine), list[str]()

    def tell(text: str) -> None:
        shown.append(text)
        if text.startswith("x") and not engine.cancelled:
            os.kill(os.getpid(), signal.SIGINT)

    def second_question() -> str:
        engine.script, engine.waits_at = "fine", -1
        return "again"

    lines = iter([lambda: "go on for ever", second_question, lambda: "/exit"])
    asyncio.run(chat_loop(recorder, renderer, context=256, ask=lambda _: next(lines)(), tell=tell))  # pyright: ignore
    assert "stopped; this turn is forgotten" in "".join(shown)
    assert engine.cancelled == 1
    assert [prompt for prompt, _ in recorder.turns] == [renderer.prompt([{"role": "user", "content": "again"}])]
    assert "".join(shown).endswith("fine\n")


def test_a_full_context_is_told(renderer: Renderer) -> None:
    assert "/reset" in talk(ScriptedEngine(renderer), renderer, ["x" * 300, "/exit"])


def test_a_turn_that_writes_the_mark_of_an_image_is_refused_and_the_next_is_answered() -> None:
    seeing, mark = Renderer(TOKENIZER), "<|image_pad|>"
    engine = Recorder(ScriptedEngine(seeing))
    shown = talk(engine, seeing, [f"what is {mark}?", "hello", EOFError()])
    assert f"(the text has {mark}, which stands for an image; take it out)" in shown
    assert [prompt for prompt, _ in engine.turns] == [seeing.prompt([{"role": "user", "content": "hello"}])]


def test_a_request_that_writes_the_mark_of_an_image_is_refused(tmp_path: Path) -> None:
    seeing, mark = Renderer(TOKENIZER), "<|image_pad|>"
    messages = [{"role": "user", "content": [{"type": "text", "text": mark}]}]
    with serving(ScriptedEngine(seeing), seeing, tmp_path) as served:
        for path, said in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": f"a {mark}"}),
            ("/v1/responses", {"input": mark}),
        ):
            refused = served.post({"model": MODEL, **said}, path)
            told = refused.json()["error"]
            assert (refused.status_code, told["param"]) == (400, next(iter(said)))
            assert told["message"] == f"the text has {mark}, which stands for an image; take it out"
