"""Ordinary prompts, unrelated to any job: training must not change the model's answers to them.

Every fourth prompt of a list is for the KL gate. The others, and prompts that the model writes itself, are held: each
step of a job penalises changes on them, with answers that the model sampled before its first job. Prompts and answers
are stored in a file, so that they stay the same after a restart.
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
    """The methods of a renderer that are needed here."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def user_opening(self) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class OrdinaryPrompts:
    """`texts`: the list. `file`: stores prompts and answers. `gate`: how many prompts the KL gate samples. `context`:
    the engine's limit for prompt and answer together. `why_not`: why nothing is held although the spec asks for it."""

    def __init__(
        self,
        spec: OrdinarySpec,
        renderer: PromptRenderer,
        texts: Sequence[str],
        file: Path,
        *,
        gate: int,
        context: int,
        why_not: str = "",
    ) -> None:
        self._spec, self._renderer, self._file = spec, renderer, file
        self._context, self._why_not = context, why_not
        prompts = self._fitting(texts)
        self._gate = prompts[3::4][:gate]
        self._listed = [prompt for number, prompt in enumerate(prompts) if number % 4 != 3]
        if gate and not self._gate:
            text = f"only {len(prompts)} of {len(texts)} prompts fit the context of {context} tokens"
            raise SpecError(
                f"ordinary.prompts = '{spec.prompts}': {text}; the KL gate uses every fourth: give at least four"
            )

    def status(self) -> dict[str, Any]:
        requested = self._spec.per_step
        return {"requested": requested, "engaged": 0 if self._why_not else requested, "why_not": self._why_not}

    async def drawn(self, engine: Engine) -> list[tuple[list[int], list[int]]]:
        """Return the KL gate's prompts with answers of the served version, sampled at temperature 1."""
        return await self._sample(engine, self._gate, _DRAWN_TOKENS)

    async def held(self, engine: Engine) -> list[list[Sequence1]]:
        """Return the other prompts with the model's own answers, as groups of one. The first call samples them."""
        if not self._spec.per_step or self._why_not:
            return []
        key = content_key([self._listed, self._spec.written, self._spec.max_tokens])
        stored = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        if stored.get("key") != key:
            version = engine.version
            prompts = [*self._listed, *await self._written(engine)]
            pairs = await self._sample(engine, prompts, self._spec.max_tokens)
            stored = {"key": key, "version": version, "said": pairs}
            atomic_write.write_json(self._file, stored)
        return [[Sequence1([*prompt, *ids], len(prompt), "1" * len(ids))] for prompt, ids in stored["said"] if ids]

    async def _written(self, engine: Engine) -> list[list[int]]:
        """Let the model write user turns, and return them as prompts."""
        opening = self._renderer.user_opening()
        pairs = await self._sample(engine, [opening] * self._spec.written, _WRITTEN_TOKENS)
        return self._fitting(
            [self._renderer.decode([i for i in ids if i not in self._renderer.end_ids]) for _, ids in pairs]
        )

    def _fitting(self, texts: Sequence[str]) -> list[list[int]]:
        prompts = [self._renderer.prompt([{"role": "user", "content": text}]) for text in texts if text.strip()]
        return [prompt for prompt in prompts if len(prompt) < self._context]

    async def _sample(
        self, engine: Engine, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[int]]]:
        """Sample one answer to each prompt; return the pairs."""
        samplings = [
            Sampling(max_tokens=min(max_tokens, self._context - len(prompt)), temperature=1.0, seed=number)
            for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, samplings, strict=True)))
        return [(prompt, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
