"""One choice of a response while it is sampled, in OpenAI's form: complete, or as chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tandem.io.tool_calls import END_TOOL_CALL
from tandem.serve.openai.text_stream import TextStream, TokenNames, token_bytes
from tandem.types import Alternatives, Completion, Message, Sampling, Span, ToolCall

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Thoughts(Protocol):
    def push(self, text: str) -> tuple[str, str]: ...  # new thought, new answer
    def close(self) -> tuple[str, str]: ...


class ToolCallReader(Protocol):
    def push(self, text: str) -> tuple[str, list[ToolCall]]: ...  # new text, newly completed calls
    def close(self) -> str: ...


class Speech(TokenNames, Protocol):
    """The renderer methods that split a sampled turn into text, thoughts and tool calls."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def end_of_thought(self) -> str: ...  # the text that ends a thought which the prompt has begun; or empty
    def thoughts(self) -> Thoughts: ...
    def call_stream(self) -> ToolCallReader: ...


class SampleSlot(Protocol):
    """The place of one sample: its prompt, and the session that records it."""

    @property
    def id(self) -> str: ...
    @property
    def session(self) -> str: ...  # empty: not recorded
    @property
    def prompt(self) -> list[int]: ...
    def keep(self, completion: Completion, told: Message, sampling: Sampling) -> None: ...


@dataclass(frozen=True)
class OpenedSamples:
    """A request's samples: `n` places for each of its prompts."""

    places: Sequence[SampleSlot]
    under_way: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context to hold while the request is answered."""

    @property
    def session(self) -> str:
        """The session of all places; empty if they belong to several."""
        first, *others = {place.session for place in self.places}
        return "" if others else first


@dataclass(frozen=True)
class SampleJob:
    opened: OpenedSamples
    n: int
    sampling: Sampling
    one_prompt: bool = True
    """Whether the prompt was sent alone, not in a list; then its ids are returned as one list."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    calls: bool = False
    """Whether calls of tools are parsed."""
    one_call: bool = False
    """Whether an answer ends with its first call."""
    speech: Speech | None = None
    """Reads the answers, if the request has its own options for the chat template."""
    messages: Sequence[Message] = ()
    """The chat, if it is kept for feedback."""
    tools: bool = False
    """Whether tools were offered."""
    model: str = ""
    """The model that was asked for; empty: the service's own."""
    behind: str = ""
    """The name of the deployment that the request came by, if it came by one."""

    @property
    def prompts(self) -> list[list[int]]:
        return [place.prompt for place in self.opened.places[:: self.n]]

    @property
    def samples(self) -> list[tuple[SampleSlot, Sampling]]:
        """The places with their sampling; sample i of each prompt has seed + i."""
        sampling = self.sampling
        if self.calls and self.one_call:
            sampling = replace(sampling, stop=(*sampling.stop, END_TOOL_CALL))
        return [
            (place, replace(sampling, seed=sampling.seed + index % self.n))
            for index, place in enumerate(self.opened.places)
        ]

    @property
    def prompt_token_ids(self) -> list[int] | list[list[int]]:
        return self.prompts[0] if self.one_prompt else self.prompts


@dataclass
class ChoiceDelta:
    """What a choice has gained since the last delta; without streaming, everything."""

    index: int
    opens: bool
    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    offsets: list[int] = field(default_factory=list[int])
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    finish_reason: str | None = None
    spans: list[Span] = field(default_factory=list[Span])


class Choice:
    def __init__(self, index: int, renderer: Speech, job: SampleJob, *, parts_thoughts: bool) -> None:
        self.version, self.num_tokens = -1, 0
        self.finish_reason = ""
        self._place, self._sampling = job.opened.places[index], job.sampling
        self._end_ids, self._offsets_wanted = renderer.end_ids.union(job.sampling.stop_ids), job.logprobs
        self._text = TextStream(renderer.decode, job.sampling.stop)
        self._thoughts = renderer.thoughts() if parts_thoughts else None
        self._calls = renderer.call_stream() if job.calls else None
        self._one_call = job.one_call
        self._told: tuple[list[str], list[str], list[dict[str, Any]]] = [], [], []  # text, thought, calls
        self.piece = ChoiceDelta(index, opens=True)
        self.told: Message = {}
        """The whole turn, once it is finished."""
        self.prompt_logprobs: list[dict[str, Any] | None] = []
        """Of each token of the prompt, by its id, if the request asks for them; None for the first."""

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], version: int, alternatives: Sequence[Alternatives] = ()
    ) -> None:
        piece, self.version = self.piece, version
        piece.alternatives += alternatives
        self.num_tokens += len(ids)
        piece.ids += ids
        piece.logprobs += (max(logprob, _LEAST_LOGPROB) for logprob in logprobs)
        # The offset of a token in the text is known only if tokens are decoded one by one.
        for part in [[token_id] for token_id in ids] if self._offsets_wanted else [ids]:
            piece.offsets.append(self._text.num_chars)
            self._tell(self._text.push([token_id for token_id in part if token_id not in self._end_ids]))

    def finish(self, completion: Completion) -> None:
        rest = slice(self.num_tokens, None)
        if completion.ids[rest]:
            ranked = completion.alternatives[rest]
            self.add(completion.ids[rest], completion.logprobs[rest], completion.spans[-1].version, ranked)
        self._tell(self._text.close(), last=True)
        reason = "stop" if self._text.stopped else completion.finish_reason
        text, thought, calls = self._told
        self.finish_reason = "tool_calls" if calls and reason == "stop" else reason
        self.piece.finish_reason = self.finish_reason
        self.piece.spans = completion.spans
        self.told = message("".join(text), "".join(thought), calls)
        self._place.keep(completion, self.told, self._sampling)

    def take(self) -> ChoiceDelta:
        piece, self.piece = self.piece, ChoiceDelta(self.piece.index, opens=False)
        return piece

    def _tell(self, text: str, *, last: bool = False) -> None:
        if self._thoughts is None:
            return self._say("", text, last=last)
        self._say(*self._thoughts.push(text))
        if last:
            self._say(*self._thoughts.close(), last=True)

    def _say(self, thought: str, text: str, *, last: bool = False) -> None:
        calls: list[ToolCall] = []
        if self._calls is not None:
            text, calls = self._calls.push(text)
            text += self._calls.close() if last else ""
        all_text, all_thought, all_calls = self._told
        if self._one_call and (all_calls or calls):
            text, calls = "" if all_calls else text, calls[: 1 - len(all_calls)]
        for call in calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            told = {"id": f"call_{self._place.id}_{len(all_calls)}", "type": "function", "function": function}
            all_calls.append(told)
            self.piece.calls.append(told)
        all_text.append(text)
        all_thought.append(thought)
        self.piece.text += text
        self.piece.thought += thought


def message(text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a turn as it is sent to the client, which is expected to send it back unchanged."""
    more: dict[str, Any] = {"reasoning_content": thought} if thought else {}
    if calls:
        more["tool_calls"] = list(calls)
    return {"role": "assistant", "content": text if text or not calls else None, **more}


# --- the two layouts: chat and completion


@dataclass(frozen=True)
class ResponseLayout:
    object: str
    chunk_object: str
    id_prefix: str
    greets: bool
    """A stream begins with an empty chunk per choice, in order, because clients add choices as they come."""
    parts_thoughts: bool
    """Whether thoughts are sent separately, as `reasoning_content`."""
    choice: Callable[[ChoiceDelta, SampleJob, TokenNames], dict[str, Any]]


def _chat_choice(piece: ChoiceDelta, job: SampleJob, names: TokenNames) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if job.logprobs:
        ranked = piece.alternatives or [()] * len(piece.ids)
        entries = [
            {**_chat_logprob(names, id, logprob), "top_logprobs": [_chat_logprob(names, *each) for each in others]}
            for id, logprob, others in zip(piece.ids, piece.logprobs, ranked, strict=True)
        ]
        logprobs = {"content": entries, "refusal": None}
    if not job.stream:
        return {"message": message(piece.text, piece.thought, piece.calls), "logprobs": logprobs}
    role = {"role": "assistant"} if piece.opens else {}
    thought = {"reasoning_content": piece.thought} if piece.thought else {}
    # Ids end in the call's number, which is also its index.
    numbered = [{"index": int(call["id"].rpartition("_")[2]), **call} for call in piece.calls]
    calls = {"tool_calls": numbered} if numbered else {}
    return {"delta": {**role, "content": piece.text, **thought, **calls}, "logprobs": logprobs}


def _chat_logprob(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(names, token_id)
    return {
        "token": _token_name(names, token_id),
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": None if raw is None else list(raw),
    }


def prompt_logprob(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    """Return the logprob of one token of a prompt, in vLLM's form."""
    return {str(token_id): {"logprob": max(logprob, _LEAST_LOGPROB), "decoded_token": _token_name(names, token_id)}}


def _by_name(names: TokenNames, ranked: Alternatives) -> dict[str, float]:
    """Return logprobs by the tokens' text; of tokens with the same text the likeliest is kept."""
    told = reversed([(_token_name(names, id), max(logprob, _LEAST_LOGPROB)) for id, logprob in ranked])
    return dict(reversed(dict(told).items()))


def _token_name(names: TokenNames, token_id: int) -> str:
    raw = token_bytes(names, token_id)
    return names.token_text(token_id) if raw is None else raw.decode("utf-8", "replace")


def _text_choice(piece: ChoiceDelta, job: SampleJob, names: TokenNames) -> dict[str, Any]:
    logprobs = {
        "tokens": [_token_name(names, token_id) for token_id in piece.ids],
        "token_logprobs": piece.logprobs,
        "text_offset": piece.offsets,
        "top_logprobs": [_by_name(names, each) for each in piece.alternatives] if piece.alternatives else None,
    }
    return {"text": piece.text, "logprobs": logprobs if job.logprobs else None}


CHAT = ResponseLayout("chat.completion", "chat.completion.chunk", "chatcmpl-", True, True, _chat_choice)
TEXT = ResponseLayout("text_completion", "text_completion", "cmpl-", False, False, _text_choice)


def usage(job: SampleJob, choices: Sequence[Choice]) -> dict[str, int]:
    prompt, sampled = sum(map(len, job.prompts)), sum(choice.num_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
