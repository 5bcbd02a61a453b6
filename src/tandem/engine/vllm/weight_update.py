"""Load versions into vLLM and know which one it serves.

consumes: versions       waits for: their bytes; running requests to end or be held; to wake, GPU memory
produces: the model name for requests; digests of the served weights, read back

Order of messages for a full version, each a call of all workers (`/collective_rpc`): `tandem_stage` until the version
has arrived beside the served one; the gate shuts, and running requests end (`finish`), are aborted and asked again
(`restart`) or are held (`continue`); `tandem_load` copies the version over the served weights and reads them back; the
gate opens; `tandem_proof` returns the digests. Some vLLM versions do not report which weights made a token, so only
requests whose tokens the workers record can be held.

An adapter goes into a slot that no request uses; from then on requests name it, and running requests end with their
own adapter. After a partial failure the engine refuses all requests rather than serve torn weights. An update that has
begun runs to its end even if its caller gives up, because workers cannot be stopped.

While vLLM sleeps with `engine.sleep = "free"`, its weights are in host memory and its keys and values are gone. Nothing
may use its GPU memory before it is awake, and it wakes only when there is room.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.engine.vllm.process import CONTROL_S, RequestGate, VllmProcess
from tandem.errors import EngineError, EngineLost, SyncError, SyncTimeout
from tandem.io.finish_anyway import to_its_end
from tandem.ops.digest import combine, parted, side_by_side, text, texts
from tandem.ops.option_report import requested
from tandem.ops.phase_timer import Phases
from tandem.protocols import WeightSource
from tandem.types import Fingerprints, OnUpdate, Served

_log = logging.getLogger(__name__)

_LOOK_S, _LOOK_MOST_S = 0.002, 0.05  # between two looks whether a version has arrived
_STALL_S = 0.02  # how long the engine's steps may wait for an adapter in flight
BASE = "base"
_ERRORS = {"sync": SyncError, "sync_timeout": SyncTimeout, "engine": EngineError}


class WeightUpdate:
    def __init__(self, process: VllmProcess, on_update: OnUpdate, version: int) -> None:
        self.version = version
        self.boot_id = uuid.uuid4().hex
        self.cache_epoch = 0
        self.model = BASE
        """The model that requests name: the base, or the adapter of the served version."""
        self._process, self._gate = process, RequestGate(process, on_update)
        self._source: WeightSource | None = None
        self._adapters: list[str] = []
        """Adapters that vLLM has loaded; a slot may be overwritten once no request uses it."""
        self._tilings: dict[str, Tiling] = {}
        """How the workers hold each adapter."""
        self._held = -1
        """The full version that the workers hold; -1: the one that they started with."""
        self._torn = ""
        self._freed: list[int] = []
        """Bytes that each worker freed to sleep; empty: awake."""
        self._moving_memory = asyncio.Lock()

    @property
    def receivers(self) -> int:
        return self._process.options.tensor_parallel

    @property
    def lent_bytes(self) -> int:
        return sum(self._freed)

    @property
    def gives_memory(self) -> bool:
        """Whether sleep frees its GPU memory."""
        return self._process.options.sleeps and not self._process.options.why_awake

    @property
    def why_torn(self) -> str:
        """Why the weights are torn; empty if they are one version. A torn engine refuses requests until a full load."""
        return self._torn and f"engine: it serves nothing until a version is loaded: {self._torn}"

    @property
    def on_update(self) -> OnUpdate:
        return self._gate.on_update

    @asynccontextmanager
    async def admitted(self, *, may_be_held: bool, model: Callable[[], str] | None = None) -> AsyncIterator[str]:
        """Admit a request until its answer is there; yield the model that it must name. `may_be_held`: if a version is
        loaded meanwhile, the workers can tell which version made each token. `model`: returns the adapter beside the
        served version that it asks; None: the served version."""
        await self._gate.opened()
        if self._torn:
            raise EngineLost(self.why_torn)
        # A request with an adapter must not continue on another base.
        named = self.model if model is None else model()
        with self._gate.running(named, may_be_held=may_be_held and named == BASE):
            yield named

    # --- versions

    async def attach(self, source: WeightSource, more: Mapping[str, Any]) -> None:
        """`more`: fields that the engine adds to the reply."""
        answers = await self.workers("tandem_attach", dict(source.link))
        first = answers[0]
        told = ("layout", "derived", "adapter_dtype", "copied", "handles", "base_memory", "versions", "digests")
        reply = {"boot_id": self.boot_id, "workers": len(answers), **{key: first[key] for key in told if key in first}}
        reply["places"] = [place for answer in answers for place in answer["places"]]
        if "boxes" in first:
            reply["boxes"] = [answer["boxes"] for answer in answers]
        if "handles" in first and len(answers) > 1:
            reply["handles"] = [answer["handles"] for answer in answers]
        reply["devices"] = [answer["device"] for answer in answers]
        reply |= more
        if self._process.options.adapter_slots and self._process.options.device != "cpu":
            reply |= {way: requested(way, why_not) for way, why_not in first["why_not"].items()}
        if self._process.options.sleeps:
            why_not = self._process.options.why_awake
            reply["sleep"] = requested("free", why_not)
        if "pieces" in first:
            shapes = {name: shape for name, (_, shape) in first["layout"].items()}
            reply["base"] = whole(_pieces(answers), shapes)
        source.attached(reply)
        self._source = source

    async def load(self, version: int) -> Served:
        if self._source is None:
            raise SyncError("engine: load() before attach(): the source of weights is unknown")
        deadline_s = float(self._source.link["deadline_s"])
        if self._source.carries == "adapter":
            return await to_its_end(self._load_adapter(version, deadline_s))
        return await to_its_end(self._load_full(version, deadline_s, live=self._source.carries == "live"))

    async def _until_here(self, version: int, deadline_s: float) -> None:
        """Wait until the version has arrived; requests continue. Each look interrupts vLLM, so looks become rarer."""
        pause_s = _LOOK_S
        while True:
            answers = await self.workers("tandem_stage", version, 0.0, deadline_s=deadline_s)
            if all(each["arrived"] for each in answers):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_MOST_S)

    def _serve(self, version: int) -> None:
        self.version = version
        self.cache_epoch += 1

    def _served(self, fingerprints: Mapping[str, str], seconds: Mapping[str, float], lent_bytes: int) -> Served:
        return Served(self.version, fingerprints, (self.boot_id,), self.cache_epoch, seconds, lent_bytes=lent_bytes)

    # --- a full version

    async def _load_full(self, version: int, deadline_s: float, *, live: bool) -> Served:
        phases, lent_bytes = Phases(), self.lent_bytes
        try:
            await self._take_back()
            if lent_bytes:
                phases.end("wake")
            if self.receivers == 1 and not live:  # several workers could deadlock, some in a step and some in this call
                await self._until_here(version, deadline_s)
                phases.end("arrive")
            shut = time.perf_counter()
            await self._gate.shut(deadline_s)
            phases.end("pause")
            answers, _ = await asyncio.gather(
                self.workers("tandem_load", version, "", None, True, deadline_s=deadline_s + CONTROL_S),
                self._forget_cached(),
            )
            phases.end("load")
            self._torn, self.model, self._held = "", BASE, version
            self._serve(version)
            await self._gate.open()
            paused_s = time.perf_counter() - shut
            phases.end("resume")
            if "fingerprints" in answers[0]:
                told = [answer["fingerprints"] for answer in answers]
                served = told[0] if len(told) == 1 else side_by_side(told)
            else:
                served = await self._proven(version)
        except BaseException as error:
            await self._after_failed_load(str(error) or type(error).__name__, live=live)
            raise
        phases.end("prove")
        return self._served(served, {**phases.seconds, **answers[0]["seconds"], "paused": paused_s}, lent_bytes)

    async def _forget_cached(self) -> None:
        """Drop cached keys and values of older versions; that also frees their memory at once."""
        await self._process.post("/reset_prefix_cache", deadline_s=CONTROL_S)
        if self._process.options.sees:  # features of images, of the older vision tower
            await self._process.post("/reset_encoder_cache", deadline_s=CONTROL_S)

    async def _proven(self, version: int) -> dict[str, str]:
        """Return the digests that were read back, after requests have gone on."""
        return _whole(await self.workers("tandem_proof", version))

    async def _after_failed_load(self, why: str, *, live: bool) -> None:
        """Serve the old version again if no worker has overwritten any of it. A sleeping engine stays asleep, and so
        does one that the trainer may have written into (`live`), until the caller has checked and wakes it."""
        if self._freed or live:
            return
        if not await self._untouched():
            return await self._tear(why)
        try:
            await self._gate.open()
        except EngineError as error:
            await self._tear(str(error))

    async def _tear(self, why: str) -> None:
        self._torn = why
        await self._gate.give_up()

    async def _untouched(self) -> bool:
        """Return whether the failed load left the old version untouched in every worker."""
        try:
            answers = await self.workers("tandem_status")
        except (SyncError, EngineError):
            return False
        return all(answer["untouched"] and answer["version"] == self._held for answer in answers)

    # --- an adapter

    async def _load_adapter(self, version: int, deadline_s: float) -> Served:
        """Load into a slot that no request uses: requests in flight end with the adapter that they began with."""
        phases, lent_bytes = Phases(), self.lent_bytes
        await self._take_back()
        if lent_bytes:
            phases.end("wake")
        if self._torn:
            raise SyncError(f"{self.why_torn}; an adapter cannot repair its base: restart the engine")
        try:
            seconds, served = await self._flip_adapter(version, deadline_s, phases)
        finally:
            await self._gate.open()  # also after a failure: what was served before was not touched
        phases.end("resume")
        return self._served(served, {**phases.seconds, **seconds}, lent_bytes)

    async def _flip_adapter(
        self, version: int, deadline_s: float, phases: Phases
    ) -> tuple[Mapping[str, float], dict[str, str]]:
        slot = await self._free_slot(deadline_s)
        loaded = await self._loaded_adapter(version, slot, deadline_s)
        name, seconds = loaded[0]["adapter"], loaded[0]["seconds"]
        phases.end("load")
        tiling = self._tilings.get(name)
        if loaded[0]["loaded"] and tiling is not None:
            served = tiling.fingerprints(each for answer in loaded for each in parted(answer["digests"]))
        else:
            served = await self._first_in_slot(name, slot, deadline_s, phases, loaded=loaded[0]["loaded"])
        if self.on_update == "restart":
            await self._gate.shut(deadline_s)
        self.model = name
        self._serve(version)
        return seconds, served

    async def _first_in_slot(
        self, name: str, slot: str, deadline_s: float, phases: Phases, *, loaded: bool
    ) -> dict[str, str]:
        """Let vLLM load the adapter, and learn which pieces of it the workers hold."""
        if not loaded:
            if slot:  # the new adapter has another form than the one in the slot
                await self._drop(slot)
            self._adapters.append(name)
            await self._process.post(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"tandem:{name}"}, deadline_s=deadline_s
            )
            phases.end("apply")
        answers = await self.workers("tandem_adapter", name, deadline_s=deadline_s)
        pieces = _pieces(answers)
        self._tilings[name] = Tiling(pieces, answers[0]["shapes"])
        phases.end("digest")
        return self._tilings[name].fingerprints(digests_of(pieces))

    async def _loaded_adapter(self, version: int, slot: str, deadline_s: float) -> list[dict[str, Any]]:
        """Load the adapter in the same call that finds it arrived. Several workers first wait for each other."""
        if self.receivers > 1:
            await self._until_here(version, deadline_s)
        while True:
            arguments = (version, slot, None if self.receivers > 1 else _STALL_S)
            answers = await self.workers("tandem_load", *arguments, deadline_s=deadline_s + CONTROL_S)
            if answers[0]["arrived"]:
                return answers
            await asyncio.sleep(_LOOK_S)

    async def _free_slot(self, deadline_s: float) -> str:
        """Return the adapter whose slot may be overwritten; empty while there are free slots. With one more adapter
        than slots, vLLM would swap adapters in use in and out at every step."""
        if len(self._adapters) < self._process.options.adapter_slots:
            return ""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    if idle := next((each for each in self._adapters if self._is_idle(each)), ""):
                        return idle
                    if self.on_update == "restart":
                        await self._gate.shut(deadline_s)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise SyncTimeout(
                f"engine: requests of older versions use every slot for adapters ({len(self._adapters)}), and none "
                f"ended within {deadline_s:g} s; give it more (--adapter-slots), or set engine.on_update = 'restart'"
            ) from error

    def _is_idle(self, name: str) -> bool:
        return name != self.model and not self._gate.is_asked(name)

    # --- adapters beside the served version: named_adapters.py

    @property
    def num_adapters(self) -> int:
        return len(self._adapters)

    async def adapter_dtype(self) -> str:
        if not self._process.options.adapter_slots:
            raise SyncError("adapters: vLLM was started without slots for them; start it with some (--adapter-slots)")
        return (await self.workers("tandem_status"))[0]["adapter_dtype"]

    async def load_beside(self, path: Path, rank: int, expected: Fingerprints) -> str:
        """Load the adapter in a file into a free slot; return vLLM's name of it. SyncError, and it is dropped, unless
        the slot holds what these fingerprints are of."""
        await self._take_back()
        name = (await self.workers("tandem_put", str(path), rank, dict(expected)))[0]["adapter"]
        try:
            served = await self._first_in_slot(name, "", CONTROL_S, Phases(), loaded=False)
            if odd := [key for key in served if served[key] != expected.get(key)]:
                raise SyncError(f"'{odd[0]}' is not in its slot what was sent; it is not served")
        except BaseException:
            await to_its_end(self._drop(name))
            raise
        return name

    def is_asked(self, model: str) -> bool:
        return self._gate.is_asked(model)

    async def drop_beside(self, name: str) -> None:
        await to_its_end(self._drop(name))

    async def _drop(self, name: str) -> None:
        self._adapters.remove(name)
        self._tilings.pop(name, None)
        await self._process.post("/v1/unload_lora_adapter", {"lora_name": name}, deadline_s=CONTROL_S)
        await self.workers("tandem_drop", name)

    # --- what is served

    async def fingerprints(self) -> Fingerprints:
        """Compute the digests of the served tensors now, under the names of the version's proof."""
        what = ("tandem_digest",) if self.model == BASE else ("tandem_adapter", self.model)
        return _whole(await self.workers(*what))

    async def remember(self) -> None:
        """Record what this engine's memory holds before a trainer may write into it; `intact` compares."""
        await self.workers("tandem_remember", self._adapters)

    async def intact(self) -> bool:
        answers = await self.workers("tandem_intact", self._adapters)
        return all(answer["intact"] for answer in answers)

    # --- its memory

    async def sleep(self) -> None:
        """Halt all requests; new ones wait. Free the GPU memory if vLLM was started for that. Then no request is held,
        because vLLM's sleep drops the state of requests."""
        await self._gate.shut(CONTROL_S, holds=not self.gives_memory)
        if self.gives_memory:
            await to_its_end(self._free_memory())

    async def wake(self) -> None:
        await self._take_back()
        await self._gate.open()

    async def _free_memory(self) -> None:
        async with self._moving_memory:
            if self._freed:
                return
            await self.remember()
            before = await self._free_bytes()
            self._freed = [0] * len(before)  # from here on it may be asleep, even if the call fails
            await self._process.post("/sleep", deadline_s=CONTROL_S, level="1")
            self._freed = [max(0, now - was) for now, was in zip(await self._free_bytes(), before, strict=True)]
            _log.info("asleep: %.2f GiB of GPU memory are free for others", self.lent_bytes / 2**30)

    async def _take_back(self) -> None:
        await to_its_end(self._wake_up())

    async def _wake_up(self) -> None:
        """Wake vLLM. EngineError while there is no room: it stays asleep, and the caller may try again."""
        async with self._moving_memory:
            if not self._freed:
                return
            for needed, free in zip(self._freed, await self._free_bytes(), strict=True):
                if free < needed:
                    raise EngineError(
                        f"engine: to wake it needs {needed / 2**30:.2f} GiB of GPU memory, and {free / 2**30:.2f} "
                        "are free; "
                        "set a smaller engine.memory_share, or let the trainer keep "
                        "less between steps"
                    )
            try:
                await self._process.post("/wake_up", deadline_s=CONTROL_S)
            except EngineError:
                await self._process.end()  # only part of its memory is back, and vLLM cannot recover from that
                raise
            self._freed = []
            await self._look_after_sleep()

    async def _look_after_sleep(self) -> None:
        """Raise unless the weights are known to be unchanged: vLLM is awake, but must not answer with others."""
        try:
            if not await self.intact():
                raise EngineError("engine: its weights changed while it slept; load a version")
        except BaseException as error:
            await self._tear(self._torn or str(error) or type(error).__name__)
            raise

    async def _free_bytes(self) -> list[int]:
        return [answer["free"] for answer in await self.workers("tandem_free_bytes")]

    # --- its workers

    async def workers(self, method: str, *args: Any, deadline_s: float = CONTROL_S) -> list[dict[str, Any]]:
        """Call a method of every worker. Return the answers, or raise the first error among them."""
        if self._freed and method not in ("tandem_free_bytes", "tandem_status"):
            raise EngineError(f"engine: it is asleep, and its weights are not on the GPU; wake it before {method}")
        body = {"method": method, "args": list(args), "timeout": deadline_s}
        answers = (await self._process.post("/collective_rpc", body, deadline_s=deadline_s))["results"]
        for answer in answers:
            if told := answer.get("error"):
                raise _ERRORS.get(told["code"], EngineError)(told["message"])
        return answers


def _whole(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return whole(_pieces(answers), answers[0]["shapes"])


def _pieces(answers: Sequence[Mapping[str, Any]]) -> list[Sequence[Any]]:
    return [piece for answer in answers for piece in answer["pieces"]]


# --- digests of whole tensors, from those of the pieces that workers serve


Range = tuple[int, int, int, int]
"""Rows from and to, columns from and to."""


class Tiling:
    """Which pieces of which tensors the workers serve. Checked once; then used for every digest."""

    def __init__(self, pieces: Iterable[Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> None:
        """`pieces`: name, row_start, row_stop, col_start, col_stop; more fields are ignored. Together they must cover
        every element of every tensor in `shapes`."""
        self._pieces = [(str(name), tuple(numbers[:4])) for name, *numbers in pieces]
        found: defaultdict[str, set[Range]] = defaultdict(set)
        for name, place in self._pieces:
            found[name].add(place)
        if odd := sorted(found.keys() ^ shapes.keys()):
            raise SyncError(
                f"engine: '{odd[0]}' is served by no worker, or by one that should not ({len(odd)} tensors)"
            )
        for name, parts in found.items():
            _check_tiling(name, parts, shapes[name])
        self._one_each = len(found) == len(self._pieces)

    def fingerprints(self, digests: Iterable[str]) -> dict[str, str]:
        """Return digests of whole tensors. `digests`: of each piece; workers with the same piece must agree."""
        if self._one_each:
            return {name: digest for (name, _), digest in zip(self._pieces, digests, strict=True)}
        found: dict[tuple[str, Range], str] = {}
        for piece, digest in zip(self._pieces, digests, strict=True):
            if found.setdefault(piece, digest) != digest:
                name, place = piece
                raise SyncError(f"engine: its workers serve different weights as '{name}', in rows and columns {place}")
        whole = combine((name, int(digest, 16)) for (name, _), digest in found.items())
        return {name: text(number) for name, number in whole.items()}


def whole(pieces: Sequence[Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return digests of whole tensors. `pieces`: as for Tiling, then the digest."""
    return Tiling(pieces, shapes).fingerprints(digests_of(pieces))


def digests_of(pieces: Sequence[Sequence[Any]]) -> list[str]:
    return texts(int(piece[5]) for piece in pieces)


def _check_tiling(name: str, parts: Iterable[Range], shape: Sequence[int]) -> None:
    rows, cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    placed = sorted(parts)
    area = sum((bottom - top) * (right - left) for top, bottom, left, right in placed)
    overlap = any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(placed) for b in placed[:i]
    )
    if area != rows * cols or overlap:
        raise SyncError(f"engine: its workers serve {area} elements of '{name}', which has {rows * cols}: {placed}")
