"""Check a remote server's response: token ids, a logprob for each, and the versions that made them.

Missing or inconsistent fields are errors that name them. Text is never tokenised again, because other ids may have the
same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from tandem.errors import EngineError
from tandem.types import Completion, FinishReason, Span

_ABOVE_ZERO = 1e-3  # how far rounding may lift a logprob above 0


class RemoteCompletion:
    """A completion in progress. `version`: of the weights that `model` names; None: the server reports versions."""

    def __init__(self, where: str, prompt: Sequence[int], max_tokens: int, model: str, version: int | None) -> None:
        self._where, self._prompt, self._max_tokens = where, list(prompt), max_tokens
        self._model, self._version = model, version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._told: list[tuple[Any, int]] = []
        """[the server's label of the weights, tokens]"""
        self._finish: FinishReason | None = None

    def add(self, event: Mapping[str, Any]) -> list[tuple[int, float, int]]:
        """Take an event; return its new tokens: id, logprob, version."""
        if self._version is not None and event.get("model") != self._model:
            raise self._refused(f"asked for model '{self._model}', but '{event.get('model')}' answers")
        self._check_prompt(event.get("prompt_token_ids"))
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._refused("an event has no list of choices")
        if any(choice.get("index") != 0 for choice in choices):
            raise self._refused("asked for one choice, but there are more")
        begin = len(self._ids)
        for choice in choices:
            self._add_choice(choice)
        version = self._live_version(event.get("weight_version"))
        return [(*token, version) for token in zip(self._ids[begin:], self._logprobs[begin:], strict=True)]

    def finished(self) -> Completion:
        if self._finish is None:
            raise self._refused("the stream ended without a finish_reason")
        if not self._ids:
            raise self._refused("the completion has no token; even an end token must be returned")
        return Completion(self._ids, self._logprobs, self._spans(), self._finish)

    # --- parts of an event

    def _check_prompt(self, ids: Any) -> None:
        if ids is not None and ids != self._prompt:
            raise self._refused("it answers another prompt: prompt_token_ids differ from those that were sent")

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        self._check_prompt(choice.get("prompt_token_ids"))
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        reason = choice.get("finish_reason")
        if ids is None and not choice.get("text") and reason is None:
            return  # the empty first event of a stream
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise self._refused(
                "the answer has no token_ids, although return_token_ids asks for them; use vLLM 0.11 or later, or "
                "tandem serve (text is never tokenised again, because other ids may have the same text)"
            )
        numbers: Any = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if ids and not isinstance(numbers, list):
            raise self._refused("the answer has no logprobs.token_logprobs, although logprobs asks for them")
        numbers = cast("list[Any]", numbers or [])
        if len(numbers) != len(ids):
            raise self._refused(f"{len(ids)} token_ids come with {len(numbers)} token_logprobs")
        if odd := [each for each in numbers if not _is_logprob(each)]:
            raise self._refused(f"a token's logprob is {odd[0]!r}")
        if ids and self._finish is not None:
            raise self._refused("tokens come after the finish_reason")
        self._ids += ids
        self._logprobs += map(float, numbers)
        if len(self._ids) > self._max_tokens:
            raise self._refused(f"more than max_tokens = {self._max_tokens} tokens come")
        if reason is not None:
            if reason not in ("stop", "length"):
                raise self._refused(f"the completion ended with '{reason}'; only stop and length are complete")
            self._finish = reason
            self._told = self._read_spans(choice.get("weight_versions"))

    # --- versions

    def _live_version(self, told: Any) -> int:
        if self._version is not None:
            return self._version
        return told if type(told) is int else -1

    def _spans(self) -> list[Span]:
        count = len(self._ids)
        told = sum(tokens for _, tokens in self._told)
        if told not in (0, count):
            raise self._refused(
                f"weight_versions count {told} tokens, but {count} arrived: did the answer restart under new weights, "
                "and send the tokens of both?"
            )
        if self._version is not None:  # the model's name stands for one version, which must not change
            if len(self._told) > 1:
                raise self._refused(f"the weights of '{self._model}' changed in the middle: {self._labels()}")
            return [Span(self._version, count)]
        versions = [(_as_version(label), tokens) for label, tokens in self._told]
        if any(version is None for version, _ in versions):
            if len(versions) > 1:
                raise self._refused(
                    f"the weights changed in the middle, and their labels are not numbers: {self._labels()}"
                )
            return [Span(-1, count)]
        return [Span(cast("int", version), tokens) for version, tokens in versions] or [Span(-1, count)]

    def _read_spans(self, told: Any) -> list[tuple[Any, int]]:
        """Return labels and token counts. Tandem sends [[version, tokens], ...]; vLLM, from 0.32, [{version, start,
        end}, ...]."""
        if not told:
            return []
        try:
            if isinstance(told[0], dict):
                bounds = [(each["start"], each["end"]) for each in told]
                if bounds[0][0] != 0 or any(one[1] != next_one[0] for one, next_one in pairwise(bounds)):
                    raise ValueError(told)
                spans = [(each["version"], each["end"] - each["start"]) for each in told]
            else:
                spans = [(version, tokens) for version, tokens in told]
            if any(type(tokens) is not int or tokens < 0 for _, tokens in spans):
                raise ValueError(told)
        except (TypeError, ValueError, KeyError):
            raise self._refused("weight_versions has an unknown form") from None
        return [span for span in spans if span[1]]

    def _labels(self) -> str:
        return ", ".join(repr(label)[:40] for label, _ in self._told[:4])

    def _refused(self, text: str) -> EngineError:
        return EngineError(f"{self._where}: {text}")


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= _ABOVE_ZERO


def _as_version(label: Any) -> int | None:
    if type(label) is int:
        return label
    return int(label) if isinstance(label, str) and label.isascii() and label.isdecimal() else None
