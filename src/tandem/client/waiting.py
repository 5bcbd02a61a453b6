"""The client of a control server for asyncio, with the names of the blocking one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tandem.client import requests
from tandem.client.index import PackageIndex, VerifiedPackage, named
from tandem.client.operations import Result, RunOperations, ServerOperations, Steps, Waiting
from tandem.client.place import known_signing_key
from tandem.client.pull import Pulled, pull
from tandem.client.requests import Call, EventReader, Patience, Reply
from tandem.shapes.runs import AuditInfo, EventInfo, FileInfo, RunInfo, UsageInfo

if TYPE_CHECKING:
    import httpx


class AsyncTandem(ServerOperations["AsyncRemoteRun"], Waiting, AbstractAsyncContextManager["AsyncTandem"]):
    """A control server. Without `url`: the one that TANDEM_CONTROL or ~/.config/tandem/control.toml names."""

    def __init__(self, url: str = "", key: str = "", *, patience_s: float = requests.PATIENCE_S) -> None:
        import httpx

        super().__init__(url, key, patience_s=patience_s)
        self._http = httpx.AsyncClient(**self._connection)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def run(self, run_id: str) -> AsyncRemoteRun:
        """Return a run by its id; it is asked for when it is used."""
        return AsyncRemoteRun(self, run_id)

    async def verify_environment(self, name: str, *, signing_key: str = "") -> VerifiedPackage:
        """Check `ORG/NAME==VERSION`: its bytes, its RECORD, and the signature of its provenance. `signing_key`: the
        server's public key; default: the one that `tandem login` kept."""
        loop = asyncio.get_running_loop()

        def get(path: str, headers: Mapping[str, str]) -> bytes:
            asked = self.answered("GET", f"/simple/{path}", headers=headers)
            return asyncio.run_coroutine_threadsafe(asked, loop).result().content

        key = signing_key or known_signing_key(self._place)
        return await asyncio.to_thread(PackageIndex(get, self.url).verify, named(name), key)

    async def usage(self, *, since: int = 0, until: int = 0) -> AsyncIterator[UsageInfo]:
        """Yield what each closed attempt used. `since`, `until`: milliseconds since 1970, for when they ended."""
        after = ""
        while True:
            page = await self.call(requests.usage(after, since, until))
            for each in page.items:
                yield each
            if not (after := page.next):
                return

    async def audit(self) -> AsyncIterator[AuditInfo]:
        """Yield who did what, the oldest first."""
        after = ""
        while True:
            page = await self.call(requests.audit(after))
            for each in page.items:
                yield each
            if not (after := page.next):
                return

    # --- requests

    async def do(self, steps: Steps[Result]) -> Result:
        try:
            call = next(steps)
            while True:
                call = steps.send(await self.call(call))
        except StopIteration as ended:
            return ended.value

    async def call(self, call: Call[Reply]) -> Reply:
        """Send a request until it is answered."""
        answer = await self.answered(call.method, call.path, call.content, call.headers)
        return requests.read(call, answer.content)

    async def answered(
        self, method: str, path: str, content: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        import httpx

        patience = Patience(self._patience_s, self.url)
        while True:
            began, after = time.monotonic(), ""
            try:
                answer = await self._http.request(method, path, content=content, headers=headers or {})
                if answer.status_code < 300:
                    return answer
                if answer.status_code not in requests.AGAIN:
                    raise requests.refusal(answer.status_code, answer.content)
                why, after = f"status {answer.status_code}", answer.headers.get("retry-after", "")
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            patience.took(time.monotonic() - began)
            await asyncio.sleep(patience.wait_s(why, after))

    async def stream(self, path: str, events: EventReader) -> AsyncIterator[EventInfo]:
        """Yield the events of one connection, until the server ends it or it breaks."""
        import httpx

        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(events.after)}
        timeout = httpx.Timeout(requests.STREAM_READ_S, connect=requests.CONNECT_S)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if answer.status_code in requests.AGAIN:
                    return
                if answer.status_code != 200:
                    raise requests.refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if (event := events.push(line)) is not None:
                        yield event
        except httpx.TransportError:
            pass
        finally:
            events.cut()


class AsyncRemoteRun(RunOperations, Waiting):
    """A run on a control server."""

    def __init__(self, server: AsyncTandem, run_id: str) -> None:
        super().__init__(run_id)
        self.server = server

    async def do(self, steps: Steps[Result]) -> Result:
        return await self.server.do(steps)

    async def follow(self, after: int = 0) -> AsyncIterator[EventInfo]:
        """Yield events until the run has ended. A broken connection is made again, and goes on where it was."""
        events = EventReader(after)
        while True:
            before = events.after
            async for event in self.server.stream(requests.stream_path(self.id), events):
                yield event
            if requests.settled(await self.info()) and not await self.events(events.after):
                return
            if events.after == before:
                await asyncio.sleep(0.5)

    async def wait(self) -> RunInfo:
        """Wait until the run has ended."""
        async for _ in self.follow():
            pass
        return await self.info()

    async def read(self, file: str, offset: int = 0, limit: int = 4 * 2**20) -> tuple[bytes, int, int]:
        """Return bytes of a mirrored file, its generation and its size."""
        answer = await self.server.answered("GET", requests.file_path(self.id, file, offset, limit))
        return answer.content, int(answer.headers["x-generation"]), int(answer.headers["x-size"])

    async def pull(self, directory: str | Path) -> Pulled:
        """Bring the mirror into a directory, which every command for run directories then reads. Only what is new
        travels."""
        loop = asyncio.get_running_loop()

        def files() -> list[FileInfo]:
            return asyncio.run_coroutine_threadsafe(self.files(), loop).result()

        def read(file: str, offset: int, limit: int) -> tuple[bytes, int, int]:
            return asyncio.run_coroutine_threadsafe(self.read(file, offset, limit), loop).result()

        return await asyncio.to_thread(pull, files, read, Path(directory))
