"""remote: an engine on any OpenAI-compatible server that accepts and returns token ids, with their logprobs.

consumes: prompts                waits for: the server, as long as it sends anything for any request
produces: completions            versions are LoRA files, each loaded under its own name by the server's API

A request names its version and ends under it; a version that arrives meanwhile is loaded beside it. One server is one
replica; several form a pool. The server's memory cannot be read, so only the canary proves what it serves.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from tandem.engine.http.silence_deadline import SilenceDeadline
from tandem.engine.remote.client import RemoteServer
from tandem.engine.remote.response import RemoteCompletion
from tandem.errors import EngineError, EngineLost, EngineSilent, SpecError, SyncError
from tandem.ops.digest import fingerprints
from tandem.ops.named_tensors import Finite
from tandem.ops.phase_timer import Phases
from tandem.protocols import OnToken, WeightSource
from tandem.spec.bridges import traits_of
from tandem.types import Completion, Fingerprints, Sampling, Served, Weights

_log = logging.getLogger(__name__)

_CONTROL_S = 10.0  # for requests that need no forward pass
_POLL_S, _POLL_WITHIN_S, _MISSES = 2.0, 2.0, 3  # lost after this many failed health checks in a row
_DRAIN_POLL_S = 0.01
_LEAST_TEMPERATURE = 0.01  # lower values are raised by some servers, or overflow
_SEEDS = 2**53  # integers that JSON can represent exactly
_PROBE_TOKENS, _CERTAIN = 4, -1e-3


@dataclass(slots=True, eq=False)
class _RemoteModel:
    """A model that requests can name. `version` None: the server's answers name the version."""

    name: str
    version: int | None
    running: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])


class RemoteEngine:
    def __init__(
        self,
        url: str,
        model: str,
        *,
        end_ids: Collection[int] = (),
        key_env: str = "",
        key_file: str = "",
        on_update: Literal["finish", "restart"] = "finish",
        deadline_s: float = 60.0,
        patience_s: float = 60.0,
        slots: int = 4,
        poll_s: float = _POLL_S,
    ) -> None:
        """`url` ends in /v1. `model`: the server's name of the base. `patience_s`: how long attach waits for the
        server. `slots`: most adapters loaded at one time."""
        if on_update not in ("finish", "restart"):
            raise SpecError(
                f"engine.on_update = '{on_update}': a request to a remote server keeps the adapter that it began with; "
                "use 'finish' or 'restart'"
            )
        if slots < 2:
            raise SpecError(
                f"engine: slots = {slots}: must be 2 or more, because a version is loaded beside the previous one"
            )
        self.version, self.cache_epoch = -1, 0
        self._server = RemoteServer(url, key_env=key_env, key_file=key_file)
        self._base = self._serving = _RemoteModel(model, None)
        self._end_ids, self._restarts, self._deadline_s = sorted(end_ids), on_update == "restart", deadline_s
        self._slots, self._poll_s, self._patience_s = slots, poll_s, patience_s
        self._silence = SilenceDeadline(deadline_s, f"engine at {self._server.url}")
        self._source: WeightSource | None = None
        self._held: list[_RemoteModel] = []
        """Adapters that may be on the server, oldest first."""
        self._prefix, self._loads = f"tandem-{uuid.uuid4().hex[:8]}", count(1)
        self._boot_id = ""
        self._owner: str | None = None
        self._as_drawn = False
        self._asking, self._closed = asyncio.Lock(), False

    # --- the protocol

    @property
    def receivers(self) -> int:
        return 1

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        if not prompt_ids:
            raise EngineError("engine: an empty prompt; send at least one token")
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise EngineError(
                f"engine: temperature = {sampling.temperature}: must be 0 (greedy) or at least {_LEAST_TEMPERATURE}"
            )
        if sampling.extras:
            raise EngineError(f"engine: {sampling.extras[0]}: a remote server is asked for plain samples only")
        await self._know_each_other(sampling)
        while True:
            model = self._serving
            if self._source is not None and model is self._base:
                raise EngineLost(f"{self._server.url}: it was restarted, and no version is loaded yet")
            cut = asyncio.timeout(None)
            try:
                async with cut:
                    model.running.add(cut)
                    try:
                        return await self._ask(model, prompt_ids, sampling, on_token)
                    finally:
                        model.running.discard(cut)  # now, because only a running request can be cut
            except TimeoutError:
                if self._closed:
                    raise EngineError("engine: closed") from None
                if not cut.expired():
                    raise  # otherwise a version arrived, and the request is repeated under it

    async def attach(self, source: WeightSource) -> None:
        traits = traits_of(source.link)
        if source.carries != "adapter" or traits is None or "remote" not in traits.engines:
            raise SyncError(
                "a remote server can only load LoRA files, and this bridge has none; set sync.bridge = 'adapter', with "
                "a directory that both can read"
            )
        listed = await self._reach()
        self._held = [each for each in self._held if each.name in listed]
        if self._serving not in self._held:  # it is new, or was restarted
            self._serving, self.version = self._base, -1
        self._source, self._boot_id, self._as_drawn = source, uuid.uuid4().hex, False
        source.attached({"boot_id": self._boot_id, "workers": 1, "layout": {}})

    async def load(self, version: int) -> Served:
        if self._source is None:
            raise SyncError("engine: load() before attach(): the source of weights is unknown")
        phases = Phases()
        weights = await asyncio.to_thread(self._source.receive, version)  # blocks until the trainer has sent it
        phases.end("wait")
        found = await asyncio.to_thread(_checked, weights, version)
        phases.end("verify")
        await self._make_room()
        phases.end("pause")
        model = _RemoteModel(f"{self._prefix}-{next(self._loads)}-v{version}", version)  # never used before
        self._held.append(model)  # from here on the server may have it, even if the call fails
        await self._put_there(model, weights.path)
        phases.end("apply")
        self._serving, self.version = model, version
        self.cache_epoch += 1  # a new name has no cached keys and values
        if self._restarts:
            self._cut(each for each in self._held if each is not model)
        await self._sweep()
        phases.end("resume")
        return Served(version, found, (self._boot_id,), self.cache_epoch, phases.seconds, read_back=False)

    async def sleep(self) -> None:
        """Do nothing: the server shares no memory with the trainer."""

    async def wake(self) -> None:
        pass

    async def lost(self) -> None:
        misses = 0
        while misses < _MISSES:
            await asyncio.sleep(self._poll_s)
            serving = self._serving
            try:
                there = serving.name in await self._there() or serving is not self._serving
            except EngineError:
                there = False
            misses = 0 if there else misses + 1

    async def found(self) -> None:
        """Return once the server answers and has the base model."""
        while True:
            try:
                if self._base.name in await self._there():
                    return
            except EngineError:
                pass
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        self._closed = True
        self._cut([self._base, *self._held])
        await asyncio.sleep(0)
        await self._server.close()

    # --- requests

    async def _ask(
        self, model: _RemoteModel, prompt_ids: Sequence[int], sampling: Sampling, on_token: OnToken | None
    ) -> Completion:
        body = self._request(model.name, prompt_ids, sampling)
        answer = RemoteCompletion(self._server.url, prompt_ids, sampling.max_tokens, model.name, model.version)
        try:
            async with self._silence.limit(), aclosing(self._server.events("/completions", body)) as events:
                async for event in events:
                    for token in answer.add(event):
                        self._silence.heard()
                        if on_token is not None:
                            on_token(*token)
        except (EngineLost, EngineSilent):
            raise
        except EngineError as error:
            if model.version is not None and model.name not in await self._there():
                raise EngineLost(f"{error}; it was restarted, and its adapters are gone") from None
            raise
        return answer.finished()

    def _request(self, model: str, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        greedy = sampling.temperature == 0
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "seed": sampling.seed % _SEEDS,
            "stop": list(sampling.stop),
            "stop_token_ids": [*self._end_ids, *sampling.stop_ids],
            "stream": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if self._owner != "tandem":
            # If they were left out, the model's generation_config.json would set them, and logprobs would not match.
            body |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            body |= {"skip_special_tokens": False}
        return body

    async def _know_each_other(self, sampling: Sampling) -> None:
        """Find out once what kind of server it is, and whether its logprobs are of the sampled distribution."""
        if self._closed:
            raise EngineError("engine: closed")
        tempered = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
        plain = sampling.temperature == 0 or not tempered
        if self._owner is not None and (plain or self._as_drawn or self._owner == "tandem"):
            return
        async with self._asking:
            if self._owner is None:
                await self._models()
            if plain or self._as_drawn or self._owner == "tandem":
                return
            # With top_k = 1 a token's logprob is 0, unless logprobs are of the distribution before top_k.
            probe = Sampling(max_tokens=_PROBE_TOKENS, top_k=1)
            completion = await self._ask(self._serving, [0], probe, None)
            if min(completion.logprobs) < _CERTAIN:
                raise EngineError(
                    f"{self._server.url}: its logprobs are of the distribution before temperature, top_p and top_k, "
                    "which are set: start vLLM with --logprobs-mode processed_logprobs, or sample with "
                    "temperature = 1, top_p = 1 and top_k = 0"
                )
            self._as_drawn = True

    async def _models(self) -> dict[str, Any]:
        listed = await self._server.models(_CONTROL_S)
        if (base := listed.get(self._base.name)) is None:
            names = ", ".join(f"'{name}'" for name in list(listed)[:5])
            raise EngineError(
                f"{self._server.url}: there is no model '{self._base.name}' (engine.model); it has {names}"
            )
        self._owner = str(base.get("owned_by"))
        return listed

    async def _reach(self) -> dict[str, Any]:
        until = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                return await self._models()
            except EngineLost:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(self._poll_s)

    async def _there(self) -> dict[str, Any]:
        if not await self._server.healthy(_POLL_WITHIN_S):
            raise EngineLost(f"{self._server.url}: the server is not healthy")
        return await self._server.models(_POLL_WITHIN_S)

    # --- versions

    async def _put_there(self, model: _RemoteModel, path: str) -> None:
        """Load an adapter on the server. After a failure the previous version stays in service."""
        body = {"lora_name": model.name, "lora_path": path}
        status, told = await self._server.post("/load_lora_adapter", body, self._deadline_s)
        if status != 200:
            raise SyncError(
                f"version {model.version} was not loaded: {told}; vLLM must be started with --enable-lora, "
                "--max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and read the adapter's files; the previous "
                "version stays in service"
            )
        listed = (await self._models()).get(model.name)
        if listed is None:
            raise SyncError(
                f"version {model.version}: the server accepted '{model.name}' but does not list it: several "
                "servers behind one URL? List each in engine.urls; the previous version stays in service"
            )
        if listed.get("root") not in (None, path):
            raise SyncError(f"version {model.version}: '{model.name}' is from '{listed['root']}', not from '{path}'")
        try:  # some servers read the files only now
            await self._ask(model, [0], Sampling(max_tokens=1, temperature=0.0), None)
        except EngineLost:
            raise
        except EngineError as error:
            raise SyncError(f"version {model.version} is loaded but does not answer: {error}") from error

    async def _make_room(self) -> None:
        while True:
            await self._sweep()
            if len(self._held) < self._slots:
                return
            oldest = next(each for each in self._held if each is not self._serving)
            if self._restarts:
                self._cut([oldest])
            while oldest.running:
                await asyncio.sleep(_DRAIN_POLL_S)

    async def _sweep(self) -> None:
        """Unload adapters that no request uses any more."""
        for model in [each for each in self._held if each is not self._serving and not each.running]:
            self._held.remove(model)
            try:
                status, told = await self._server.post("/unload_lora_adapter", {"lora_name": model.name}, _CONTROL_S)
            except EngineLost as error:  # the next request will notice
                status, told = 0, str(error)
            if status not in (200, 404):
                _log.warning("an adapter could not be unloaded: %s", told)

    def _cut(self, models: Collection[_RemoteModel] | Any) -> None:
        now = asyncio.get_running_loop().time()
        for model in models:
            for cut in model.running:
                if not cut.expired():
                    cut.reschedule(now)


def _checked(weights: Weights, version: int) -> Fingerprints:
    """Return fingerprints of the adapter's files; the server's memory cannot be read."""
    if weights.version != version or weights.kind != "adapter" or not weights.path:
        raise SyncError(
            f"asked for version {version} as LoRA files, and got {weights.kind} weights of version {weights.version}"
        )
    arrived = dict(weights.tensors())
    if not arrived:
        raise SyncError("the adapter that arrived is empty: only the base would be served")
    finite = Finite()
    for name, tensor in arrived.items():
        finite.add(name, tensor)
    if odd := finite.odd():
        raise SyncError(f"adapter: '{odd[0]}' is not finite")
    found, sent = fingerprints(arrived), weights.expected
    if odd := sorted(name for name in found.keys() | sent.keys() if found.get(name) != sent.get(name)):
        raise SyncError(
            f"version {version}: the files of '{odd[0]}' are not what was sent ({len(odd)} of {len(found)} "
            "tensors); the previous version stays in service"
        )
    return found
