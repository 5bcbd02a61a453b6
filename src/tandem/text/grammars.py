"""Which tokens may come next, if an answer must follow a grammar. llguidance computes it.

A matcher follows one answer. It is asked with the answer's ids so far, so it can start again when they do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from tandem.errors import MissingExtra, SamplingRefused
from tandem.text.renderer import Renderer
from tandem.types import Grammar

INSTALL = "pip install llguidance"
_KEPT = 32  # compiled grammars
_TAIL = 32  # last ids in which the text that ends the free part is looked for


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, renderer: Renderer, num_ids: int) -> None:
        """`num_ids`: size of the vocabulary."""
        self._renderer, self._num_ids = renderer, num_ids
        self._compiled = lru_cache(_KEPT)(self._compile)

    def why_not(self, grammar: Grammar) -> str:
        """Return why answers cannot follow this grammar; empty if they can."""
        try:
            self._compiled(grammar.lark)
        except (MissingExtra, SamplingRefused) as error:
            return str(error)
        return ""

    def matcher(self, grammar: Grammar) -> Matcher:
        """SamplingRefused if the grammar is wrong."""
        return Matcher(self._compiled(grammar.lark), grammar.after, self._renderer)

    def _compile(self, lark: str) -> Any:
        tokenizer = self._tokenizer  # first, for MissingExtra
        from llguidance import LLMatcher

        found = LLMatcher(tokenizer, lark, log_level=0)
        begun = found.deep_copy()
        if not begun.is_error():
            begun.compute_bitmask()  # finds what can only be seen while it is followed
        if not begun.is_error():
            return found
        raise SamplingRefused(f"the schema cannot be followed: {_reason(begun.get_error())}")

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingExtra(f"it needs llguidance, which is not installed here; {INSTALL}") from error
        return from_tokenizer(
            self._renderer.tokenizer, n_vocab=self._num_ids, eos_token=sorted(self._renderer.end_ids)
        )  # fmt: skip


class Matcher:
    """Follows the ids of one answer."""

    def __init__(self, compiled: Any, after: str, renderer: Renderer) -> None:
        self._compiled, self._after, self._renderer = compiled, after, renderer
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning of the answer."""
        self._state = self._compiled.deep_copy()
        self._read, self._free = 0, bool(self._after)

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """Return which tokens may follow the answer's `ids`: a bit each, lowest first. None: any; no bit: none."""
        if len(ids) < self._read:
            self.reset()
        for end in range(self._read + 1, len(ids) + 1):
            if self._free:
                tail = self._renderer.decode(ids[max(0, end - _TAIL) : end], skip_special=False)
                self._free = self._after not in tail
            elif not self._state.is_stopped() and not self._state.consume_token(ids[end - 1]):
                return b""
        self._read = len(ids)
        if self._free:
            return None
        bits = self._state.compute_bitmask()
        return b"" if self._state.is_error() else bits


def _reason(error: str) -> str:
    """Return llguidance's reason without the grammar and the state that it shows."""
    said = re.sub(
        r"^at \d+\(\d+\): failed to compile JSON schema: |\s+\d+ \| .*|\s+<state>.*", "", error.strip(), flags=re.S
    )
    return "no answer can" if said == "NoExtensionBias" else " ".join(said.split())[:300]
