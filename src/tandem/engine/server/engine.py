"""An Engine whose weights and sampling are in another process. It owns that process, or uses a running server.

consumes: prompts; a source's link         waits for: the process to be ready, its answers, the watch thread
produces: completions, `lost`              a vanished engine raises EngineLost; `attach` and `load` recover it

`attach` or the first prompt starts an owned process. After it died or hung, `found` or `attach` starts it again; a pool
calls `found` first, so that the other engines do not wait for the start. A process that Tandem did not start gets no
signals. After a restart the process has other weights, so no prompt goes to it before a version is loaded.

Order of messages for a version: POST /engine/attach with the source's link (once a connection), whose reply has the
layout; then, for each version, POST /engine/load while the trainer sends it over the bridge; the reply has the digests.
/engine/sleep and /engine/wake pause the engine between versions, with a lease that this process renews.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.engine.server.child_process import Owned, OwnedProcess
from tandem.engine.server.connection import Connection
from tandem.errors import (
    EngineError,
    EngineLost,
    EngineSilent,
    NotLetIn,
    SpecError,
    SyncError,
    SyncTimeout,
    TandemError,
)
from tandem.io.child_process import Ready
from tandem.io.engine_messages import served_of
from tandem.io.process_identity import identity
from tandem.io.token_file import read_token
from tandem.ops.phase_timer import Phases
from tandem.protocols import OnToken, WeightSource
from tandem.spec.bridges import traits_of
from tandem.types import Completion, Sampling, Served

_log = logging.getLogger(__name__)

_LOAD_GRACE_S = 5.0  # added to the deadline that the server itself keeps
_LOOK_AGAIN_S = 0.3


@dataclass(frozen=True)
class ExistingServer:
    """An engine process that this run did not start."""

    url: str
    token_file: Path
    patience_s: float = 20.0
    """How long to wait for it to come back."""


class ServerEngine:
    def __init__(
        self,
        place: Owned | OwnedProcess | ExistingServer,
        *,
        receivers: int = 1,
        deadline_s: float = 60.0,
        shares_memory: bool = False,
        shares_device: bool = False,
        lease_s: float = 60.0,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`shares_memory`: the trainer writes the memory that this engine reads. `shares_device`: both use one GPU.
        Either makes `sleep` a pause, which ends `lease_s` after this process stops renewing it. `make_room`: frees
        cached memory of this process; called before the engine starts or wakes."""
        self._place, self._receivers, self._deadline_s = place, receivers, deadline_s
        self._shares_memory, self._pauses, self._lease_s = shares_memory, shares_memory or shares_device, lease_s
        self._make_room = make_room
        place = OwnedProcess(place) if isinstance(place, Owned) else place
        self._process = place if isinstance(place, OwnedProcess) else None
        self._connection: Connection | None = None
        self._connecting, self._is_connected = asyncio.Lock(), asyncio.Event()
        self._source: WeightSource | None = None
        self._restarts = False
        """The bridge of `_source` starts a new engine with each version."""
        self._attachment, self._owner = 0, uuid.uuid4().hex
        self._version, self._loaded_boot = -1, ""
        self._serving = asyncio.Event()
        self._serving.set()
        self._renewing: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[Connection] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def receivers(self) -> int:
        return self._receivers

    @property
    def is_coming(self) -> bool:
        """Whether the engine is starting, being connected to, or loading its first version; each has a deadline."""
        return self._connecting.locked() or not self._serving.is_set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        while True:
            connection = await self._ready()
            try:
                return await connection.complete(prompt_ids, sampling, session, on_token)
            except EngineLost:
                if not connection.left:
                    raise

    async def attach(self, source: WeightSource) -> None:
        if not source.link:
            raise SyncError("engine: this bridge works within one process, and the engine is in another")
        await self._stop_renewing()
        self._make_room()
        await self._found_before()
        connection = await self._connected()
        if connection.boot_id != self._loaded_boot:
            self._serving.clear()
        reply = await self._take(connection, source)
        if reply.get("boot_id") != connection.boot_id:
            raise EngineLost(f"engine: {connection.url} was restarted while attaching")
        if reply.get("workers", self._receivers) != self._receivers:
            raise EngineError(
                f"engine: {connection.url} has {reply['workers']} workers, and {self._receivers} were expected"
            )
        if self._shares_memory:
            self._keep_renewing()
        source.attached(reply)
        traits = traits_of(source.link)
        self._source, self._restarts = source, traits is not None and traits.restarts_engine

    async def load(self, version: int) -> Served:
        connection, source = self._attached()
        await self._stop_renewing()
        self._make_room()
        if self._restarts:
            served = await self._load_by_restart(source, version)
        else:
            body = {**self._caller(), "version": version, "deadline_s": self._deadline_s}
            try:
                served = served_of(await connection.post("/engine/load", body, self._deadline_s + _LOAD_GRACE_S))
            except EngineSilent as error:
                raise SyncTimeout(str(error)) from error
        self._version, self._loaded_boot = served.version, self._attached()[0].boot_id
        self._attached()[0].expect_loaded()
        self._serving.set()
        return served

    async def sleep(self) -> None:
        if self._pauses:
            if lent_bytes := await self._pause():
                _log.info("the engine sleeps: %.2f GiB of GPU memory are free for the trainer", lent_bytes / 2**30)
            self._keep_renewing()

    async def wake(self) -> None:
        if self._renewing is not None:
            await self._stop_renewing()
            self._make_room()
            await self._attached()[0].post("/engine/wake", self._caller(), self._deadline_s)

    async def lost(self) -> None:
        while True:
            await self._is_connected.wait()
            connection = self._connection
            assert connection is not None
            await connection.gone.wait()
            if not connection.left:
                return

    async def found(self) -> None:
        """Return once the lost server answers again, or cannot; start an owned process. A trainer waits for `attach`,
        and not for this: other engines sample and get versions meanwhile."""
        if self._pauses:  # it starts in `attach`, when the trainer has made room
            return
        if self._finding is None or self._finding.done():  # done: lost again, and nothing attached it meanwhile
            self._make_room()
            self._finding = asyncio.create_task(self._connected(), name="engine start")
        finding = self._finding
        await asyncio.wait([finding])  # does not cancel it: the start is on a thread, and goes on
        if not finding.cancelled():
            finding.exception()  # seen: `attach` raises it, or the next start takes its place

    async def close(self) -> None:
        await self._stop_renewing()
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)

    # --- the connection

    async def _ready(self) -> Connection:
        """Return the connection once the engine serves the loaded version. EngineLost if it is lost before that."""
        if self._connection is None:
            await self._connected()
        while not self._serving.is_set():
            connection = self._connection
            assert connection is not None
            waits = [asyncio.ensure_future(self._serving.wait()), asyncio.ensure_future(connection.gone.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if connection.gone.is_set() and not connection.left:
                raise EngineLost(connection.why)
            await self._is_connected.wait()
        assert self._connection is not None
        return self._connection

    async def _found_before(self) -> None:
        """Wait for the start that `found` began, and raise why it failed."""
        finding, self._finding = self._finding, None
        if finding is None:
            return
        try:
            await asyncio.shield(finding)
        except asyncio.CancelledError:
            self._finding = finding  # for the next attach: another start would end this one
            raise

    async def _connected(self) -> Connection:
        """Return a live connection. Start an owned process if it does not run."""
        async with self._connecting:
            if self._connection is not None and await self._is_well(self._connection):
                return self._connection
            if self._connection is not None:
                await self._connection.close()
            if self._process is not None:
                ready = await asyncio.to_thread(self._process.start_again)
                return await self._connect(ready)
            return await self._reach()

    async def _is_well(self, connection: Connection) -> bool:
        if connection.gone.is_set():
            return False
        try:
            status = await connection.status()
        except EngineError:
            return False
        return status["boot_id"] == connection.boot_id and status["state"] != "dead"

    async def _reach(self) -> Connection:
        assert isinstance(self._place, ExistingServer)
        until = time.monotonic() + self._place.patience_s
        while True:
            try:
                token = read_token(self._place.token_file, "engine.token_file")
                return await self._connect(Ready(self._place.url, 0, token))
            except (EngineError, OSError) as error:
                if time.monotonic() > until:
                    if self._connection is None and isinstance(error, NotLetIn | OSError):  # probably a wrong setting
                        raise SpecError(f"engine.token_file = '{self._place.token_file}': {error}") from error
                    raise EngineLost(f"engine: none answers at {self._place.url}: {error}") from error
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _connect(self, ready: Ready) -> Connection:
        connection = Connection(ready.url, ready.token, self._process.exit_report if self._process else lambda: "")
        status = await connection.open()
        if self._loaded_boot not in ("", connection.boot_id):
            self._serving.clear()
        self._connection, self._version = connection, int(status["version"])
        self._is_connected.set()
        return connection

    def _attached(self) -> tuple[Connection, WeightSource]:
        if self._connection is None or self._source is None:
            raise SyncError("engine: load() before attach(): the source of weights is unknown")
        return self._connection, self._source

    async def _take(self, connection: Connection, source: WeightSource) -> dict[str, Any]:
        body = {
            "link": dict(source.link),
            "lease_s": self._lease_s,
            "writing": self._shares_memory,
            "owner": self._owner,
            "process": identity(),
        }
        reply = dict(await connection.post("/engine/attach", body, self._deadline_s))
        self._attachment = int(reply.pop("attachment"))
        return reply

    def _caller(self) -> dict[str, Any]:
        return {"attachment": self._attachment, "boot_id": self._attached()[0].boot_id}

    # --- pauses

    async def _pause(self) -> int:
        body = {**self._caller(), "lease_s": self._lease_s, "writing": self._shares_memory}
        return int((await self._attached()[0].post("/engine/sleep", body, self._deadline_s))["lent_bytes"])

    def _keep_renewing(self) -> None:
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="engine lease")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._pause()
            except EngineSilent as error:
                _log.warning("the pause was not renewed: %s", error)
            except TandemError as error:
                _log.warning("the pause is over: %s", error)  # load() or wake() will say so
                return

    async def _stop_renewing(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    # --- a version by a restart

    async def _load_by_restart(self, source: WeightSource, version: int) -> Served:
        if self._process is None:
            raise SyncError(
                "engine: sync.bridge = 'restart' must end the engine's process, and this run did not start it; leave "
                "engine.url out"
            )
        phases = Phases()
        weights = await asyncio.to_thread(source.receive, version)
        phases.end("wait")
        if not weights.path:
            raise SyncError(
                f"engine: version {version} was not written to a directory, so no process can start from it"
            )
        async with self._connecting:
            self._serving.clear()
            self._is_connected.clear()
            if self._connection is not None:
                await self._connection.leave("engine: it restarts with the next version")
            ready = await asyncio.to_thread(self._process.start_with, weights.path, version)
            connection = await self._connect(ready)
        phases.end("apply")
        if self._pauses:
            await self._take(connection, source)  # only an attached caller may send it to sleep
        served = served_of(await connection.post("/engine/digest", {"version": version}, self._deadline_s))
        phases.end("prove")
        return replace(served, seconds=phases.seconds)
