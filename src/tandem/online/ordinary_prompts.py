"""Ordinary prompts, outside of every lesson: what the model says to them is to stay as it is.

Every fourth prompt of a list is for the KL gate. The others, and prompts that the model writes itself, are held while a
lesson is trained, with answers that the model sampled before its first lesson. Prompts and answers are kept in a file,
so that after a restart they are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.online.messages import Sequence1
from tandem.online.sample_replay import content_key
from tandem.protocols import Engine
from tandem.spec.online_gates import OrdinarySpec
from tandem.types import Message, Sampling

_DRAWN_TOKENS, _WRITTEN_TOKENS = 16, 40


class PromptRenderer(Protocol):
    """What is needed of a renderer."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def user_opening(self) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class OrdinaryPrompts:
    """`texts`: the list. `file`: where prompts and answers are kept. `gate`: how many prompts the KL gate samples.
    `context`: of the engine, prompt and answer together. `why_not`: why nothing is held, where the spec asks for it."""

    def __init__(
        self,
        spec: OrdinarySpec,
        speaks: PromptRenderer,
        texts: Sequence[str],
        file: Path,
        *,
        gate: int,
        context: int,
        why_not: str = "",
    ) -> None:
        self._spec, self._speaks, self._file = spec, speaks, file
        self._context, self._why_not = context, why_not
        prompts = self._fitting(texts)
        self._gate = prompts[3::4][:gate]
        self._listed = [prompt for number, prompt in enumerate(prompts) if number % 4 != 3]
        if gate and not self._gate:
            text = f"{len(prompts)} of {len(texts)} prompts fit the context of {context} tokens"
            raise SpecError(f"ordinary.prompts = '{spec.prompts}': {text}; the KL gate needs every fourth: give four")

    def status(self) -> dict[str, Any]:
        asked = self._spec.per_step
        return {"requested": asked, "engaged": 0 if self._why_not else asked, "why_not": self._why_not}

    async def drawn(self, engine: Engine) -> list[tuple[list[int], list[int]]]:
        """Return what the served version says to the KL gate's prompts, sampled at temperature 1."""
        return await self._said(engine, self._gate, _DRAWN_TOKENS)

    async def held(self, engine: Engine) -> list[list[Sequence1]]:
        """Return the other prompts with the model's own answers, as groups of one. The first call asks the engine."""
        if not self._spec.per_step or self._why_not:
            return []
        key = content_key([self._listed, self._spec.written, self._spec.max_tokens])
        kept = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        if kept.get("key") != key:
            version = engine.version
            prompts = [*self._listed, *await self._written(engine)]
            said = await self._said(engine, prompts, self._spec.max_tokens)
            kept = {"key": key, "version": version, "said": said}
            atomic_write.write_json(self._file, kept)
        return [[Sequence1([*prompt, *ids], len(prompt), "1" * len(ids))] for prompt, ids in kept["said"] if ids]

    async def _written(self, engine: Engine) -> list[list[int]]:
        """Prompts as the model itself writes them: sampled from where the user's turn begins."""
        opening = self._speaks.user_opening()
        asked = await self._said(engine, [opening] * self._spec.written, _WRITTEN_TOKENS)
        return self._fitting(
            [self._speaks.decode([i for i in ids if i not in self._speaks.end_ids]) for _, ids in asked]
        )

    def _fitting(self, texts: Sequence[str]) -> list[list[int]]:
        prompts = [self._speaks.prompt([{"role": "user", "content": text}]) for text in texts if text.strip()]
        return [prompt for prompt in prompts if len(prompt) < self._context]

    async def _said(self, engine: Engine, prompts: Sequence[list[int]], most: int) -> list[tuple[list[int], list[int]]]:
        how = [
            Sampling(max_tokens=min(most, self._context - len(prompt)), temperature=1.0, seed=number)
            for number, prompt in enumerate(prompts)
        ]
        said = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, how, strict=True)))
        return [(prompt, answer.ids) for prompt, answer in zip(prompts, said, strict=True)]
