"""What a request's `Shape` does to its row of logits, before temperature, top-k and top-p. Shapes: V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.types import Alternatives, Grammar, Sampling


class TokenMatcher(Protocol):
    def allowed(self, ids: Sequence[int]) -> bytes | None: ...  # what may follow, a bit a token; None: any
    def reset(self) -> None: ...


class GrammarCompiler(Protocol):
    def why_not(self, grammar: Grammar) -> str: ...
    def matcher(self, grammar: Grammar) -> TokenMatcher: ...


class Shaper:
    """Shapes the logits of one request."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], matcher: TokenMatcher | None) -> None:
        self._shape, self._temperature, self._prompt, self._matcher = (
            sampling.shape, sampling.temperature, prompt, matcher,
        )  # fmt: skip
        self.is_stuck = False
        """Whether the grammar allows no token, so that the request must end."""
        self._counts_V: Tensor | None = None
        """How often the answer has each token, up to `_counted` tokens of it."""
        self._counted = 0
        self._in_prompt_V: Tensor | None = None

    def reset(self) -> None:
        """The answer begins again."""
        self.is_stuck, self._counts_V, self._counted = False, None, 0
        if self._matcher is not None:
            self._matcher.reset()

    def shaped(self, logits_V: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the logits of the token after the answer's `ids`."""
        shape = self._shape
        if self._matcher is not None and (bits := self._matcher.allowed(ids)) is not None:
            may_V = _as_mask(bits, logits_V)
            if self.is_stuck or not bool(may_V.any()):
                self.is_stuck = True
                return logits_V
            logits_V = logits_V.masked_fill(~may_V, -torch.inf)
        if shape.logit_bias:
            biased, values = zip(*shape.logit_bias, strict=True)
            logits_V = logits_V.index_add(
                0, torch.tensor(biased, device=logits_V.device),
                torch.tensor(values, device=logits_V.device, dtype=logits_V.dtype),
            )  # fmt: skip
        if shape.repetition_penalty != 1.0:
            if self._in_prompt_V is None:
                self._in_prompt_V = _occurrences(logits_V, self._prompt) > 0
            seen_V = self._in_prompt_V | (self._counts(logits_V, ids) > 0)
            penalised_V = torch.where(
                logits_V > 0, logits_V / shape.repetition_penalty, logits_V * shape.repetition_penalty
            )
            logits_V = torch.where(seen_V, penalised_V, logits_V)
        if shape.frequency_penalty or shape.presence_penalty:
            counts_V = self._counts(logits_V, ids)
            logits_V = logits_V - shape.frequency_penalty * counts_V - shape.presence_penalty * (counts_V > 0)
        if shape.min_p > 0 and self._temperature > 0:  # a greedy answer takes the likeliest anyway
            least = logits_V.max() + self._temperature * math.log(shape.min_p)
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        return logits_V

    def _counts(self, logits_V: Tensor, ids: Sequence[int]) -> Tensor:
        """Return how often each token is in the answer; only new tokens are counted."""
        if self._counts_V is None:
            self._counts_V = _occurrences(logits_V, ids)
        elif self._counted < len(ids):
            self._counts_V = self._counts_V + _occurrences(logits_V, ids[self._counted :])
        self._counted = len(ids)
        return self._counts_V


def likeliest(logprobs_V: Tensor, count: int) -> Alternatives:
    """Return the likeliest tokens with their logprobs."""
    found = logprobs_V.topk(min(count, logprobs_V.shape[-1]))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def _occurrences(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    """Return how often each token is in `ids`."""
    counted = torch.tensor(ids, dtype=torch.long, device=logits_V.device)
    return torch.bincount(counted, minlength=logits_V.shape[-1])


def _as_mask(bits: bytes, logits_V: Tensor) -> Tensor:
    """Return the bits as booleans; tokens beyond the last bit are not allowed."""
    size = logits_V.shape[-1]
    packed = torch.frombuffer(bytearray(bits.ljust(size // 8 + 1, b"\0")), dtype=torch.uint8)
    unpacked = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return unpacked.flatten()[:size].bool().to(logits_V.device)
