"""Turn chats into token ids, each turn exactly once.

A conversation is the opening prompt, the sampled ids, and the template's glue between turns; it is never rendered
again. Rendering the history again would change tokens that the policy was sampled from or trained on: templates remove
old thoughts, and tokenizers merge tokens across boundaries.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any

from tandem.errors import ImageError, TemplateError, TextTooLong
from tandem.io.image_parts import has_images
from tandem.io.image_store import SCHEME
from tandem.io.tool_calls import TOOL_CALL, parse_calls
from tandem.protocols import ImageSource
from tandem.text.special_tokens import mend
from tandem.text.thinking_stream import END_THINK, THINK, ThoughtStream
from tandem.text.tokenizer import fingerprint
from tandem.text.tool_call_stream import CallStream
from tandem.types import Message, PlacedImage, Thought, ToolCall, text_of

_SENTINEL = "Q7sentinelQ7"
_PIECE_CHARS = 2**16
_PAD = "<|image_pad|>"
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", _PAD, "<|video_pad|>")
"""Written by the template for an image, and by nothing else: text that has them would stand for an image."""
_OWN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
    | {"chat_template", "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "continue_final_message", "tokenizer_kwargs", "self"}
)
"""Names of `apply_chat_template`, and what it gives to the template itself."""

Tools = Sequence[Mapping[str, Any]]
"""The tools of a conversation, as JSON schemas: `{"type": "function", "function": {"name", "parameters", ...}}`."""


class Renderer:
    def __init__(self, tokenizer: Any, *, thinking: bool = False, images: ImageSource | None = None) -> None:
        """`images`: of a model that sees; None: its messages are text only."""
        self.tokenizer = tokenizer
        self.images = images
        self._latest: tuple[list[int], str] = [], ""
        # Tokenizers of models of text may have the marks, too, but their templates do not write them.
        vocabulary = tokenizer.get_vocab() if images is not None or _PAD in str(tokenizer.chat_template) else {}
        self._vision_ids = {name: vocabulary[name] for name in _VISION_MARKS if name in vocabulary}
        self.thinking = thinking
        self._options: Mapping[str, Any] = {}
        self._most_tokens, self._longest_token = 0, max(map(len, tokenizer.get_vocab()))
        closing = self.encode(self._after_assistant([], opens_next=False))
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        end = next((place for place, token_id in enumerate(closing) if token_id in special), -1)
        if end < 0 or self.decode(closing[:end]).strip():
            raise TemplateError(
                "model: its chat template does not close an assistant turn with a special token, so the end of a turn "
                "cannot be sampled; use a template that writes the end-of-turn token after the assistant's content"
            )
        self.end_id: int = closing[end]
        """The template's end of an assistant's turn."""
        self._before_end = closing[:end]  # some templates write a space there
        asked: Message = {"role": "user", "content": "."}
        inside = {*self.prompt([asked])[1:], *self._next_opening(asked)} & special - {self.end_id}
        self.mended: tuple[str, ...] = mend(tokenizer, self.end_id, inside)
        """What was changed in the tokenizer's special tokens, a sentence each."""
        self.never_ends: frozenset[int] = frozenset(inside)
        """Special tokens that the template writes within a conversation, so that they do not end an answer."""
        self.end_ids: frozenset[int] = frozenset({self.end_id, tokenizer.eos_token_id} - {None})
        self._opens_thought = self._begins_thought()
        mark = self.encode(END_THINK)
        self._end_think_id = mark[0] if len(mark) == 1 else None
        if thinking and END_THINK not in self.decode(mark):
            raise TemplateError(
                f"model.thinking = true: {END_THINK} is a special token of this tokenizer, so the end of a thought "
                "would be invisible; set model.thinking = false, or make it an ordinary added token"
            )

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tokenizer and its template."""
        return fingerprint(self.tokenizer)

    def within(self, context: int) -> Renderer:
        """Return the same renderer with a context limit: it refuses a text that cannot fit before processing it."""
        bounded = copy(self)
        bounded._most_tokens = context
        return bounded

    def with_options(self, options: Mapping[str, Any]) -> Renderer:
        """Return the same renderer with options for the template. TemplateError if the template does not use one."""
        template = str(self.tokenizer.chat_template)
        for name in options:
            if name in _OWN_NAMES or not re.search(rf"\b{re.escape(name)}\b", template):
                raise TemplateError(f"chat_template_kwargs: the model's chat template has no option '{name}'")
        told = copy(self)
        told._options = {**self._options, **options}
        told._opens_thought = told._begins_thought()
        return told

    def options_of_effort(self, effort: str) -> Mapping[str, Any]:
        """Return the template's options for OpenAI's `reasoning_effort`. TemplateError if it has none for it."""
        template, thinks = str(self.tokenizer.chat_template), effort not in ("none", "minimal")
        values = {"reasoning_effort": effort, "enable_thinking": thinks}
        options = {name: value for name, value in values.items() if re.search(rf"\b{name}\b", template)}
        if thinks and not options:
            raise TemplateError(
                f"reasoning_effort = '{effort}': the model's chat template knows no reasoning; leave it out"
            )
        return options

    # --- text to ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without images. ImageError if it has a mark that stands for one."""
        return self._with_pads(self._ids(text), ())

    def _ids(self, text: str) -> list[int]:
        if not self._most_tokens:
            return self.tokenizer.encode(text, add_special_tokens=False)
        self._refuse_too_long(text)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > self._most_tokens:
            raise TextTooLong(f"{len(ids)} tokens do not fit a context of {self._most_tokens}; send less")
        return ids

    def check_chars(self, texts: Iterable[str]) -> None:
        """Raise TextTooLong if the texts together cannot fit, even if every token were the longest one."""
        most = self._most_tokens * self._longest_token
        if self._most_tokens and (num_chars := sum(map(len, texts))) > most:
            raise TextTooLong(
                f"{num_chars} characters do not fit a context of {self._most_tokens} tokens: at most {most} could; "
                "send less"
            )

    def _refuse_too_long(self, text: str) -> None:
        """Count a long text's tokens in pieces, because encoding it at once takes memory for each token. Allow a tenth
        more than the limit, because a cut between pieces can split tokens."""
        self.check_chars([text])
        count, begins = 0, range(0, len(text), _PIECE_CHARS) if len(text) > _PIECE_CHARS else ()
        for begin in begins:
            count += len(self.tokenizer.encode(text[begin : begin + _PIECE_CHARS], add_special_tokens=False))
            if count > self._most_tokens * 1.1:
                raise TextTooLong(
                    f"the first {min(begin + _PIECE_CHARS, len(text))} of {len(text)} characters have more tokens than "
                    f"a context of {self._most_tokens}; send less"
                )

    def text(self, messages: Sequence[Message], *, opens_next: bool) -> str:
        """Return a whole conversation as the template writes it; `opens_next`: with the opening of an answer."""
        return self._render(messages, opens_next)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the opening of a conversation, up to the assistant's turn."""
        text = self._render(messages, True, tools)
        if tools and text == self._render(messages, True):
            raise TemplateError("model: its chat template ignores tools, so the model would not know them")
        return self._with_pads(self._ids(text), messages)

    def user_opening(self) -> list[int]:
        """Return the ids before a conversation's first user message."""
        text, found, _ = self._render([{"role": "user", "content": _SENTINEL}], False).partition(_SENTINEL)
        if not found:
            raise TemplateError("model: its chat template drops the user's message")
        return self.encode(text)

    def glue(self, messages: Sequence[Message], last_id: int, tools: Tools = ()) -> list[int]:
        """Return the ids between a sampled turn that ended with `last_id` and the next turn: new messages and
        markers."""
        ids = self._with_pads(self._ids(self._after_assistant(messages, opens_next=True, tools=tools)), messages)
        # The sampled end of turn exists already; a turn that a limit or a stop string ended has none.
        place = len(self._before_end)
        return ids[place + 1 :] if ids[place : place + 1] == [last_id] else ids

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[bool]]:
        """Return a recorded conversation as ids, with True for the assistant's tokens, including the end of turn.
        `tools`: those that it was offered, as in an episode."""
        ids: list[int] = []
        trained: list[bool] = []
        pending: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            context = self.glue(pending, ids[-1], tools) if ids else self.prompt(pending, tools)
            spoken = [*self.encode(self._spoken(message)), *self._before_end, self.end_id]
            ids += context + spoken
            trained += [False] * len(context) + [True] * len(spoken)
            pending = []
        return ids, trained

    # --- images

    def placed(self, messages: Sequence[Message], ids: Sequence[int], begin: int = 0) -> list[PlacedImage]:
        """Return where the images of messages stand. `ids`: what `prompt`, `glue` or `conversation` made of these
        messages. `begin`: the tokens before `ids`, by which all offsets are moved."""
        found, at = list[PlacedImage](), 0
        if self.images is not None:
            for digest in _digests(messages):
                at = ids.index(self.images.pad_id, at)
                length = self.images.length(digest)
                found.append(PlacedImage(digest, begin + at, self.images.grid(digest), length))
                at += length
        return found

    def _with_pads(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return ids with a pad for each token of each image. ImageError if text has a mark that stands for an image:
        the model would take it for one."""
        digests = _digests(messages)
        for name, token_id in self._vision_ids.items():
            wanted = 0 if name == "<|video_pad|>" else len(digests)
            if ids.count(token_id) > wanted:
                raise ImageError(f"the text has {name}, which stands for an image; take it out")
        if not digests:
            return ids
        assert self.images is not None, "_render has refused images"
        if ids.count(self.images.pad_id) < len(digests):
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ImageError(f"model: its chat template drops images, of the roles {roles}")
        rest = iter(digests)
        lengths = (self.images.length(next(rest)) if each == self.images.pad_id else 1 for each in ids)
        return [each for each, length in zip(ids, lengths, strict=True) for _ in range(length)]

    # --- ids to text

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Return a sampled turn's text without end of turn, stop string and thoughts."""
        return self._answer(self._turn(ids)[1], stop)

    def calls(self, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, list[ToolCall]]:
        """Return that text without tool calls, and the tool calls. A call within a thought is ignored."""
        body = self._body(ids)
        hidden = TOOL_CALL not in self.decode(self.encode(TOOL_CALL))  # it is a special token
        return parse_calls(self._answer(self.decode(body, skip_special=not hidden), stop))

    def thought(self, ids: Sequence[int], stop: Sequence[str] = ()) -> Thought | None:
        """Return the thought in a sampled turn; None if it has none."""
        body, text = self._turn(ids)
        text = cut_at_stop(text, stop)
        if not self._has_thought(text):
            return None
        if END_THINK not in text:
            return Thought(len(body), closed=False)
        most = body.index(self._end_think_id) + 1 if self._end_think_id in body else len(body)
        if END_THINK not in self.decode(body[: most - 1]):
            return Thought(most, closed=True)
        # If the end mark has several tokens, bisection finds the shortest prefix that contains it.
        length = bisect_left(range(most), True, key=lambda count: END_THINK in self.decode(body[:count]))
        return Thought(length, closed=True)

    def thoughts(self) -> ThoughtStream:
        """Return a splitter of thoughts and answer for one streamed turn."""
        return ThoughtStream(opened=self._opens_thought)

    @property
    def end_of_thought(self) -> str:
        """The text that ends the thought which a prompt has begun; empty if prompts begin none."""
        return END_THINK if self._opens_thought else ""

    def _begins_thought(self) -> bool:
        return self._render([{"role": "user", "content": "."}], True).rstrip().endswith(THINK)

    def _answer(self, text: str, stop: Sequence[str]) -> str:
        text = cut_at_stop(text, stop)
        if self._has_thought(text):
            _, closed, text = text.partition(END_THINK)
            return text.lstrip() if closed else ""
        return text

    def call_stream(self) -> CallStream:
        """Return a splitter of text and tool calls for one streamed answer."""
        return CallStream()

    def _turn(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return a sampled turn's ids without the end of turn, and their text. The latest turn's text is kept, because
        a recorder asks for its answer and for its thought, and decoding takes most of that time."""
        body, latest = self._body(ids), self._latest
        if latest[0] != body:
            latest = self._latest = body, self.decode(body)
        return latest

    def _body(self, ids: Sequence[int]) -> list[int]:
        return list(ids[:-1]) if ids and ids[-1] in self.end_ids else list(ids)

    def _has_thought(self, text: str) -> bool:
        return self._opens_thought or text.lstrip().startswith(THINK)

    # --- the template

    def _spoken(self, message: Message) -> str:
        """Return the assistant's turn as the template writes it after the generation prompt, without the end of
        turn."""
        if not (message.get("tool_calls") or message.get("reasoning_content")):
            return text_of(message["content"])
        opening = self._render([{"role": "user", "content": "."}], True)
        whole = self._render([{"role": "user", "content": "."}, message], False)
        end = self.decode([self.end_id], skip_special=False)
        body, found, _ = whole.removeprefix(opening).rpartition(end)
        if not whole.startswith(opening) or not found:
            raise TemplateError(
                "model: its chat template writes tool calls where they cannot be separated from the prompt"
            )
        return body

    def _after_assistant(self, messages: Sequence[Message], *, opens_next: bool, tools: Tools = ()) -> str:
        history: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}]
        text = self._render([*history, *messages], opens_next, tools)
        _, found, after = text.partition(_SENTINEL)  # the first one: a message may contain it, too
        if not found:
            raise TemplateError("model: its chat template drops earlier assistant turns, so turns cannot be joined")
        return after

    def _next_opening(self, asked: Message) -> list[int]:
        """Return the ids that open a turn after an assistant's; none if the template takes one question only."""
        closing = self._after_assistant([], opens_next=False)
        try:
            return self.encode(self._after_assistant([asked], opens_next=True).removeprefix(closing))
        except TemplateError:
            return []

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = ()) -> str:
        if self.images is None and has_images(messages):
            raise ImageError("this model takes text only, and a message has an image")
        self.check_chars(text_of(message.get("content")) for message in messages)
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{"enable_thinking": self.thinking, **self._options},
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            what = f"the roles {roles}" if roles else "an empty conversation"
            raise TemplateError(f"model: its chat template refuses {what}: {error}") from error

    @cache  # noqa: B019 - as long-lived as the renderer, bounded by the vocabulary
    def token_text(self, token_id: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(token_id)


def _digests(messages: Sequence[Message]) -> list[str]:
    """Return the digests of the messages' images, in their order."""
    contents = [message["content"] for message in messages if has_images([message])]
    given = [part.get("image") for content in contents for part in content if part["type"] != "text"]
    if not all(isinstance(each, str) and each.startswith(SCHEME) for each in given):
        raise ImageError("a message has an image that no edge has kept; images come from data files and environments")
    return [each.removeprefix(SCHEME) for each in given]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string."""
    return text[: min((found for word in stop if (found := text.find(word)) >= 0), default=len(text))]
