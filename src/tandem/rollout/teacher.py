"""A teacher that a server has: it gives the logprobs of the answers' tokens, for on-policy distillation.

The server must answer `POST /v1/completions` with `prompt_logprobs`, as `tandem serve` and vLLM do. Other servers are
refused before the run begins: of OpenAI's own API, and of SGLang's and llama.cpp's form of it, no answer has them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from tandem.errors import EngineError, EngineLost, SpecError
from tandem.rollout.json_post import JsonPost
from tandem.types import Group, Trajectory

if TYPE_CHECKING:
    import httpx

PROBE = "Straße №5, 漢字 🙂: 12,345.67 def f(x):\n\treturn x  # ok?"
_ABOVE_ZERO = 1e-3  # how far rounding may lift a logprob above 0


class ServedTeacher:
    """`url` ends in /v1. `model`: its name there; empty: the server has one model. `key`: of the server's API."""

    def __init__(self, url: str, model: str, key: str, *, timeout_s: float) -> None:
        self._url, self._model, self._timeout_s = url.rstrip("/"), model, timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.route = JsonPost(self._url + "/completions", key, timeout_s=timeout_s)

    async def begin(self, encode: Callable[[str], list[int]], opening: str) -> None:
        """Find the model, and check that it reads texts as the policy does and scores given tokens. `encode`: the
        policy's tokenizer. `opening`: a conversation in the policy's template, whose special tokens are compared."""
        self._model = self._model or await self._only_model()
        for text in (PROBE, opening):
            ours = encode(text)
            answer = self._json(await self._post({"prompt": text, "return_token_ids": True, "max_tokens": 1}))
            theirs = _prompt_ids(answer)
            if theirs is None:
                raise self._refused(
                    "its answer has no prompt_token_ids, so the tokenizers cannot be compared; serve the teacher with "
                    "`tandem serve` or vLLM 0.11 or later"
                )
            if theirs not in (ours, [*theirs[:1], *ours]):  # vLLM writes a beginning-of-text token before a text
                raise self._refused(
                    f"its tokenizer is not the policy's: {text[:20]!r}... is {len(theirs)} tokens there and "
                    f"{len(ours)} here, or has other ids; choose a teacher with the policy's tokenizer"
                )
        await self._logprobs(encode(PROBE))

    async def score(self, groups: Sequence[Group]) -> None:
        """Set `teacher_logprobs` of all trajectories; EngineError, or EngineLost, if the server fails."""
        asking = [asyncio.ensure_future(self._score(each)) for group in groups for each in group]
        try:
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _score(self, trajectory: Trajectory) -> None:
        if trajectory.images:
            raise self._refused(f"task {trajectory.task_id} has images, and a served teacher is sent tokens only")
        trajectory.teacher_logprobs = [0.0, *await self._logprobs(trajectory.ids)]

    async def _logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the logprobs of ids[1:] under the teacher."""
        answer = self._json(await self._post({"prompt": list(ids), "prompt_logprobs": 1, "max_tokens": 1}))
        found = cast("list[Any] | None", answer["choices"][0].get("prompt_logprobs"))
        if not isinstance(found, list):
            raise self._refused(
                "its answer has no prompt_logprobs, so it cannot score given tokens; serve the teacher with `tandem "
                "serve` or vLLM"
            )
        if len(found) != len(ids):
            raise self._refused(f"{len(ids)} tokens were sent, and {len(found)} prompt_logprobs came back")
        return [self._logprob(entry, token_id) for entry, token_id in zip(found[1:], ids[1:], strict=True)]

    def _logprob(self, entry: Any, token_id: int) -> float:
        try:
            value: Any = entry[str(token_id)]["logprob"]
        except (LookupError, TypeError):
            value = None
        if not isinstance(value, int | float) or not math.isfinite(value) or value > _ABOVE_ZERO:
            raise self._refused(f"the logprob of token {token_id} is {value!r}")
        return min(float(value), 0.0)

    async def _only_model(self) -> str:
        import httpx

        try:
            async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s) as client:
                listed = self._json(await client.get(self._url + "/models"))
        except httpx.TransportError as error:
            raise EngineLost(self._text(f"{type(error).__name__}: {error}")) from error
        names = [str(each.get("id")) for each in listed.get("data", ())]
        if len(names) != 1:
            raise SpecError(
                f"algorithm.teacher_model = '': the server at {self._url} has {', '.join(names) or 'no model'}; name "
                "the teacher"
            )
        return names[0]

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        import httpx

        try:
            return await self.route.post({"model": self._model, "temperature": 0.0, **body})
        except TimeoutError as error:
            told = f"no answer within algorithm.teacher_timeout_s = {self._timeout_s:g} s"
            raise EngineLost(self._text(told)) from error
        except httpx.TransportError as error:
            raise EngineLost(self._text(f"{type(error).__name__}: {error}")) from error

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise self._refused(f"it answered {response.status_code}: {response.text[:300]}")
        try:
            found: Any = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or not cast("dict[str, Any]", found).keys() & {"choices", "data"}:
            raise self._refused(f"its answer is not one of OpenAI's API: {response.text[:100]!r}")
        return cast("dict[str, Any]", found)

    def _text(self, told: str) -> str:
        return f"algorithm.teacher = '{self._url}': {told}"

    def _refused(self, told: str) -> EngineError:
        return EngineError(self._text(told))


def _prompt_ids(answer: Mapping[str, Any]) -> list[int] | None:
    """Return the ids of the prompt as the server read it: of the choice in vLLM, of the whole answer in Tandem."""
    return answer["choices"][0].get("prompt_token_ids") or answer.get("prompt_token_ids")
