"""The blocking client of a control server. `waiting.py` has the same for asyncio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tandem.client import requests
from tandem.client.index import PackageIndex, VerifiedPackage, named
from tandem.client.operations import Blocking, Result, RunOperations, ServerOperations, Steps
from tandem.client.place import known_signing_key
from tandem.client.pull import Pulled, pull
from tandem.client.requests import Call, EventReader, Patience, Reply
from tandem.shapes.runs import AuditInfo, EventInfo, RunInfo, UsageInfo

if TYPE_CHECKING:
    import httpx


class Tandem(ServerOperations["RemoteRun"], Blocking, AbstractContextManager["Tandem"]):
    """A control server. Without `url`: the one that TANDEM_CONTROL or ~/.config/tandem/control.toml names."""

    def __init__(self, url: str = "", key: str = "", *, patience_s: float = requests.PATIENCE_S) -> None:
        import httpx

        super().__init__(url, key, patience_s=patience_s)
        self._http = httpx.Client(**self._connection)

    def close(self) -> None:
        self._http.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self, run_id: str) -> RemoteRun:
        """Return a run by its id; it is asked for when it is used."""
        return RemoteRun(self, run_id)

    def verify_environment(self, name: str, *, signing_key: str = "") -> VerifiedPackage:
        """Check `ORG/NAME==VERSION`: its bytes, its RECORD, and the signature of its provenance. `signing_key`: the
        server's public key; default: the one that `tandem login` kept."""
        return self.index().verify(named(name), signing_key or self.signing_key())

    def index(self) -> PackageIndex:
        """Return the server's index of packages."""

        def get(path: str, headers: Mapping[str, str]) -> bytes:
            return self.answered("GET", f"/simple/{path}", headers=headers).content

        return PackageIndex(get, self.url)

    def signing_key(self) -> str:
        """Return the server's signing key as `tandem login` kept it. SpecError if there is none."""
        return known_signing_key(self._place)

    def usage(self, *, since: int = 0, until: int = 0) -> Iterator[UsageInfo]:
        """Yield what each closed attempt used. `since`, `until`: milliseconds since 1970, for when they ended."""
        after = ""
        while True:
            page = self.call(requests.usage(after, since, until))
            yield from page.items
            if not (after := page.next):
                return

    def audit(self) -> Iterator[AuditInfo]:
        """Yield who did what, the oldest first."""
        after = ""
        while True:
            page = self.call(requests.audit(after))
            yield from page.items
            if not (after := page.next):
                return

    # --- requests

    def do(self, steps: Steps[Result]) -> Result:
        try:
            call = next(steps)
            while True:
                call = steps.send(self.call(call))
        except StopIteration as ended:
            return ended.value

    def call(self, call: Call[Reply]) -> Reply:
        """Send a request until it is answered."""
        answer = self.answered(call.method, call.path, call.content, call.headers)
        return requests.read(call, answer.content)

    def answered(
        self, method: str, path: str, content: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        import httpx

        patience = Patience(self._patience_s, self.url)
        while True:
            began, after = time.monotonic(), ""
            try:
                answer = self._http.request(method, path, content=content, headers=headers or {})
                if answer.status_code < 300:
                    return answer
                if answer.status_code not in requests.AGAIN:
                    raise requests.refusal(answer.status_code, answer.content)
                why, after = f"status {answer.status_code}", answer.headers.get("retry-after", "")
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            patience.took(time.monotonic() - began)
            time.sleep(patience.wait_s(why, after))

    def stream(self, path: str, events: EventReader) -> Iterator[EventInfo]:
        """Yield the events of one connection, until the server ends it or it breaks."""
        import httpx

        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(events.after)}
        timeout = httpx.Timeout(requests.STREAM_READ_S, connect=requests.CONNECT_S)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if answer.status_code in requests.AGAIN:
                    return
                if answer.status_code != 200:
                    raise requests.refusal(answer.status_code, answer.read())
                for line in answer.iter_lines():
                    if (event := events.push(line)) is not None:
                        yield event
        except httpx.TransportError:
            pass
        finally:
            events.cut()


class RemoteRun(RunOperations, Blocking):
    """A run on a control server."""

    def __init__(self, server: Tandem, run_id: str) -> None:
        super().__init__(run_id)
        self.server = server

    def do(self, steps: Steps[Result]) -> Result:
        return self.server.do(steps)

    def follow(self, after: int = 0) -> Iterator[EventInfo]:
        """Yield events until the run has ended. A broken connection is made again, and goes on where it was."""
        events = EventReader(after)
        while True:
            before = events.after
            yield from self.server.stream(requests.stream_path(self.id), events)
            if requests.settled(self.info()) and not self.events(events.after):
                return
            if events.after == before:
                time.sleep(0.5)

    def wait(self) -> RunInfo:
        """Wait until the run has ended."""
        for _ in self.follow():
            pass
        return self.info()

    def read(self, file: str, offset: int = 0, limit: int = 4 * 2**20) -> tuple[bytes, int, int]:
        """Return bytes of a mirrored file, its generation and its size."""
        answer = self.server.answered("GET", requests.file_path(self.id, file, offset, limit))
        return answer.content, int(answer.headers["x-generation"]), int(answer.headers["x-size"])

    def pull(self, directory: str | Path) -> Pulled:
        """Bring the mirror into a directory, which every command for run directories then reads. Only what is new
        travels."""
        return pull(self.files, self.read, Path(directory))
