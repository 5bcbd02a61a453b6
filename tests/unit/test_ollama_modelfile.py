"""The Modelfile for Ollama: its template, run as Go would run it, writes what the tokenizer's own template writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_tokenizers import CHATML, chatml_tokenizer

from tandem.errors import TemplateError
from tandem.text.ollama_modelfile import modelfile
from tandem.text.renderer import Renderer

DEFAULT_SYSTEM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TRIMS = DEFAULT_SYSTEM.replace("message['content']", "message['content'] | trim")
NO_SYSTEM = """\
{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
{{ '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + ' ' + message.content + '<|im_end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model ' }}{% endif %}"""
IN_THE_USERS_TURN = """\
{% if messages[0].role == 'system' %}{% set first = messages[0].content + ' ' %}{% set messages = messages[1:] %}\
{% else %}{% set first = '' %}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + ': ' }}\
{% if loop.first %}{{ first }}{% endif %}{{ message.content + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"""

CHATS: list[list[tuple[str, str]]] = [
    [("user", "sort waltz")],
    [("system", "Answer in one word."), ("user", "Why?")],
    [("user", "a"), ("assistant", "b\n\nc"), ("user", "d {x}"), ("assistant", "é"), ("user", "f")],
    [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")],
]


def go(text: str, chat: list[tuple[str, str]]) -> str:
    """Run the actions that Modelfiles of ours have, as Go's text/template does, with Ollama's .System and .Messages."""
    template = text.partition('TEMPLATE """')[2].partition('"""')[0]
    system = "\n\n".join(content for role, content in chat if role == "system")
    head, body, tail = parts(r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template)
    if "{{ if .System }}" in head:
        with_one, without = re.fullmatch(
            r"\{\{ if \.System \}\}(.*)\{\{ else \}\}(.*)\{\{ end \}\}", head, re.S
        ).groups()  # pyright: ignore[reportOptionalMemberAccess]
        head = with_one.replace("{{ .System }}", system) if system else without
    shape = r'\{\{ if eq \.Role "user" \}\}(.*)\{\{ else if eq \.Role "assistant" \}\}(.*)\{\{ end \}\}'
    user, assistant = parts(shape, body)
    turns = {"user": user, "assistant": assistant, "system": ""}
    return head + "".join(turns[role].replace("{{ .Content }}", content) for role, content in chat) + tail


def parts(shape: str, text: str) -> tuple[str, ...]:
    found = re.fullmatch(shape, text, re.DOTALL)
    assert found is not None, text
    return found.groups()


def rendered(tokenizer: Any, chat: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in chat]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TRIMS], ids=["qwen3", "default-system", "trims"])
def test_ollama_writes_what_the_model_was_trained_on(template: str):
    tokenizer = chatml_tokenizer(template)
    text = modelfile(Renderer(tokenizer), "model-q8_0.gguf")
    assert text.startswith("FROM ./model-q8_0.gguf\n")
    for chat in CHATS:
        assert go(text, chat) == rendered(tokenizer, chat)
    stops = re.findall(r'^PARAMETER stop "(.*)"$', text, re.M)
    assert sorted(stops) == ["<|endoftext|>", "<|im_end|>"]


def test_a_template_without_system_messages_says_so():
    tokenizer = chatml_tokenizer(NO_SYSTEM)
    text = modelfile(Renderer(tokenizer), "m.gguf")
    assert text.startswith("# The model's chat template takes no system message")
    assert go(text, CHATS[2]) == rendered(tokenizer, CHATS[2])


def test_the_first_token_is_left_to_llama_cpp_where_it_adds_one():
    tokenizer = chatml_tokenizer("{{ bos_token }}" + DEFAULT_SYSTEM)
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    text = modelfile(Renderer(tokenizer), "m.gguf")
    assert go(text, CHATS[1]) == rendered(tokenizer, CHATS[1]), "the tokenizer adds none, so the template writes it"
    adds = AddsBos(tokenizer)
    text = modelfile(Renderer(adds), "m.gguf")
    assert "<|endoftext|>" + go(text, CHATS[1]) == rendered(tokenizer, CHATS[1])
    adds.chat_template = tokenizer.chat_template = DEFAULT_SYSTEM
    with pytest.raises(TemplateError, match=r"does not write <\|endoftext\|>, which llama\.cpp would put"):
        modelfile(Renderer(adds), "m.gguf")


class AddsBos:
    """A tokenizer that begins each text with its first token, as llama.cpp would then do, too."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self.inner.encode(text, add_special_tokens=False)
        return [self.inner.bos_token_id, *ids] if add_special_tokens else ids


@pytest.mark.parametrize(
    ("template", "thinking", "reason"),
    [
        (IN_THE_USERS_TURN, False, "the beginning of the user's first turn differs from that of later ones"),
        (CHATML, True, "thoughts of earlier answers are cut from the history"),
        ("{{ strftime_now('%d') }}" + DEFAULT_SYSTEM, False, "the date of today"),
        (DEFAULT_SYSTEM.replace("<|im_start|>' +", "<|im_start|>{{' +"), False, "braces or quotes"),
        (
            DEFAULT_SYSTEM.replace("message['content']", "message['content'] | replace('Q2', 'q2')"),
            False,
            "once and unchanged",
        ),
        (
            DEFAULT_SYSTEM.replace("+ message['role'] +", "+ message['role'] + ('!' if loop.index > 3 else '') +"),
            False,
            "does not write 5 messages one after the other",
        ),
    ],
)
def test_a_template_that_cannot_be_mapped_is_refused_with_the_reason(template: str, thinking: bool, reason: str):
    with pytest.raises(TemplateError, match=f"the chat template cannot be written for Ollama: .*{reason}"):
        modelfile(Renderer(chatml_tokenizer(template), thinking=thinking), "m.gguf")
