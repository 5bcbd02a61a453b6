"""Write an Ollama Modelfile: the chat template of a tokenizer, a Jinja program, as a template of Go.

The template is asked for conversations of marked words. The text between the marks is what stands around each turn. A
conversation that is put together of these parts must be the one that the tokenizer's template writes; if it is not, the
template is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tandem.errors import TemplateError
from tandem.text.renderer import Renderer
from tandem.types import Message

_SYSTEM, _USER, _ASSISTANT, _NEXT = "Q1systemQ1", "Q2userQ2", "Q3assistantQ3", "Q4nextQ4"
_TRIALS: tuple[tuple[str, ...], ...] = (
    ("What is 12 + 5?",),
    ("One line.\nAnd another one.", "Yes: <b>3</b>", "Why?", 'It is "so".', "Thanks"),
)
"""Contents of user and assistant in turn, to compare the two templates with."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What stands around the messages. `begin`: before a conversation without a system message."""

    begin: str
    system: tuple[str, str] | None
    """Before and after the system message; None: the template refuses one."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    """Before the answer that the model is to write."""

    def conversation(self, messages: Sequence[Message]) -> str:
        around = {"user": self.user, "assistant": self.assistant, "system": self.system or ("", "")}
        begin = "" if messages[0]["role"] == "system" else self.begin
        turns = (each["content"].join(around[each["role"]]) for each in messages)
        return begin + "".join(turns) + self.answer

    def texts(self) -> list[str]:
        return [self.begin, *(self.system or ()), *self.user, *self.assistant, self.answer]


def modelfile(renderer: Renderer, gguf: str) -> str:
    """Return the Modelfile of a GGUF file with this tokenizer. TemplateError if its chat template cannot be mapped."""
    if renderer.thinking:
        _refuse("thoughts of earlier answers are cut from the history, which a template of Ollama cannot do")
    if "strftime_now" in str(renderer.tokenizer.chat_template):
        _refuse("it writes the date of today, which would be that of the export for ever")
    parts = _parts(renderer)
    _compare(parts, renderer)
    parts = _without_bos(parts, renderer.tokenizer)
    if any(mark in text for text in parts.texts() for mark in ("{{", "}}", '"""')) or parts.answer.endswith('"'):
        _refuse("it writes braces or quotes that a Modelfile cannot say")
    stops = (renderer.decode([each], skip_special=False) for each in sorted(renderer.end_ids))
    lines = [
        f"FROM ./{gguf}",
        f'TEMPLATE """{_go(parts)}"""',
        *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops),
    ]
    if parts.system is None:
        lines.insert(0, "# The model's chat template takes no system message; Ollama leaves one out.")
    return "\n".join(lines) + "\n"


def _parts(renderer: Renderer) -> _Parts:
    user, assistant = _message("user", _USER), _message("assistant", _ASSISTANT)
    begin, tail = _split(renderer.text([user], opens_next=True), _USER)
    user_end = _split(renderer.text([user], opens_next=False), _USER)[1]
    assistant_end = _split(renderer.text([user, assistant], opens_next=False), _ASSISTANT)[1]
    rest = _split(renderer.text([user, assistant, _message("user", _NEXT)], opens_next=True), _USER)[1]
    between, rest = _split(rest, _ASSISTANT)
    again, _ = _split(rest, _NEXT)
    user_begin = _after(again, assistant_end)
    system = None
    try:
        asked = renderer.text([_message("system", _SYSTEM), user], opens_next=True)
    except TemplateError:
        pass
    else:
        before, rest = _split(asked, _SYSTEM)
        system = before, _before(_split(rest, _USER)[0], user_begin)
    around = (user_begin, user_end), (_after(between, user_end), assistant_end)
    return _Parts(_before(begin, user_begin), system, *around, _after(tail, user_end))


def _compare(parts: _Parts, renderer: Renderer) -> None:
    """Refuse parts that do not make up the conversations that the tokenizer's template writes."""
    for contents in _TRIALS:
        turns = [_message(("user", "assistant")[at % 2], content) for at, content in enumerate(contents)]
        openings = [[], [_message("system", "Be brief.")]] if parts.system else [[]]
        for messages in ([*opening, *turns] for opening in openings):
            if parts.conversation(messages) != renderer.text(messages, opens_next=True):
                _refuse(f"it does not write {len(messages)} messages one after the other in the same way")


def _without_bos(parts: _Parts, tokenizer: object) -> _Parts:
    """Return the parts without the first token, where llama.cpp adds it itself."""
    bos, encode = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "encode")  # noqa: B009 - of any tokenizer
    if not bos or encode("a")[:1] != [getattr(tokenizer, "bos_token_id", None)]:
        return parts
    if not all(text.startswith(bos) for text in (parts.begin, *(parts.system or ())[:1])):
        _refuse(f"it does not write {bos}, which llama.cpp would put before each prompt of this tokenizer")
    system = parts.system and (parts.system[0].removeprefix(bos), parts.system[1])
    return _Parts(parts.begin.removeprefix(bos), system, parts.user, parts.assistant, parts.answer)


def _go(parts: _Parts) -> str:
    """Return the template of Go. Ollama passes all system messages together as .System, and also among .Messages."""
    begin = parts.begin
    if parts.system is not None:
        said = "{{ .System }}".join(parts.system)
        begin = f"{{{{ if .System }}}}{said}{{{{ else }}}}{begin}{{{{ end }}}}"
    user, assistant = ("{{ .Content }}".join(around) for around in (parts.user, parts.assistant))
    turn = f'{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}'
    return f"{begin}{{{{ range .Messages }}}}{turn}{{{{ end }}}}{parts.answer}"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _split(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        _refuse(f"it does not write the {mark[2:-2].replace('next', 'user')}'s message once and unchanged")
    return before, after


def _after(text: str, start: str) -> str:
    if not text.startswith(start):
        _refuse("the end of a turn depends on what follows")
    return text[len(start) :]


def _before(text: str, end: str) -> str:
    if not text.endswith(end):
        _refuse("the beginning of the user's first turn differs from that of later ones")
    return text[: len(text) - len(end)]


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(f"the chat template cannot be written for Ollama: {reason}")
