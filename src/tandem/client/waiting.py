"""The client of a control server for asyncio, with the names of the blocking one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tandem.client import requests
from tandem.client.index import PackageIndex, VerifiedPackage, named, push_body
from tandem.client.place import Place, find_place, known_signing_key
from tandem.client.pull import Pulled, pull
from tandem.client.requests import Call, EventReader, Patience, Reply
from tandem.errors import ControlNotKnown, SpecError
from tandem.shapes.deployments import DeployBody, DeploymentInfo
from tandem.shapes.packages import PackageInfo, PackageVersionInfo, YankBody
from tandem.shapes.plans import PROMPT_TOKENS, ROW_TOKENS, PlanBody, PlanInfo
from tandem.shapes.runs import (
    AttemptInfo,
    AuditInfo,
    EventInfo,
    FileInfo,
    KeyBody,
    KeyInfo,
    Me,
    OrgInfo,
    ProjectBody,
    ProjectInfo,
    RunInfo,
    RunPage,
    Scope,
    SecretBody,
    SecretInfo,
    SubmitBody,
    TargetInfo,
    UsageInfo,
)
from tandem.spec.package_names import package_name

if TYPE_CHECKING:
    import httpx


class AsyncTandem(AbstractAsyncContextManager["AsyncTandem"]):
    """A control server. Without `url`: the one that TANDEM_CONTROL or ~/.config/tandem/control.toml names."""

    def __init__(self, url: str = "", key: str = "", *, patience_s: float = requests.PATIENCE_S) -> None:
        import httpx

        place = Place(url.rstrip("/"), key) if url else find_place()
        if place is None:
            raise SpecError(
                "no control server is configured: use `tandem login URL`, or set TANDEM_CONTROL and TANDEM_CONTROL_KEY"
            )
        self._place, self.url, self._patience_s = place, place.url, patience_s
        self._http = httpx.AsyncClient(
            base_url=place.url, headers={"Authorization": f"Bearer {place.key}"}, follow_redirects=False,
            timeout=httpx.Timeout(requests.READ_S, connect=requests.CONNECT_S),
            trust_env=False,  # no proxy from environment variables: it would see the key
        )  # fmt: skip

    async def close(self) -> None:
        await self._http.aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def me(self) -> Me:
        return await self.call(requests.me())

    async def targets(self) -> list[TargetInfo]:
        return (await self.call(requests.targets())).items

    async def plan(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        target: str,
        gpu: str = "",
        prompt_tokens: int = PROMPT_TOKENS,
        row_tokens: int = ROW_TOKENS,
    ) -> PlanInfo:
        """Return what a spec needs on each offer of a target: memory, seconds and cost. Nothing is started. The server
        reads no data: the lengths are those that you give. `gpu`: plan for this card in place of the target's."""
        body = requests.body(
            PlanBody, spec_toml=requests.spec_text(spec), target=target, gpu=gpu, prompt_tokens=prompt_tokens,
            row_tokens=row_tokens,
        )  # fmt: skip
        return await self.call(requests.plan(body))

    async def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        target: str,
        max_cost_usd: float = 0.0,
        name: str = "",
        project: str = "default",
        group: str = "",
        retries: int = 3,
        secrets: Sequence[str] = (),
    ) -> AsyncRemoteRun:
        """Queue a run of a spec: a TOML file's path, or a dict of the same tables."""
        body = requests.body(
            SubmitBody, spec_toml=requests.spec_text(spec), target=target, max_cost_usd=max_cost_usd, name=name,
            project=project, group=group, retries=retries, secrets=list(secrets),
        )  # fmt: skip
        return AsyncRemoteRun(self, (await self.call(requests.submit(body))).id)

    def run(self, run_id: str) -> AsyncRemoteRun:
        """Return a run by its id; it is asked for when it is used."""
        return AsyncRemoteRun(self, run_id)

    async def runs(self, *, state: str = "", project: str = "", group: str = "", most: int = 200) -> list[RunInfo]:
        """Return runs, the newest first."""
        found: list[RunInfo] = []
        page = RunPage(items=[], next="")
        while len(found) < most:
            limit = min(200, most - len(found))
            asked = requests.runs(state=state, project=project, group=group, before=page.next, limit=limit)
            page = await self.call(asked)
            found += page.items
            if not page.next:
                break
        return found

    async def deploy(
        self,
        run: str,
        step: int,
        *,
        name: str,
        weight: int = 0,
        canary: float = 0.0,
        keep_s: int = 0,
        feedback: bool = False,
        engine: Literal["hf", "vllm"] = "hf",
        target: str = "",
    ) -> DeploymentInfo:
        """Put a checkpoint of a run behind a name, as its next revision. `canary`: its share of the requests while it
        is tried. `keep_s`: end its replica after so long without a request; 0: never. `feedback`: keep its chats, and
        take thumbs. `engine`: vllm: the vLLM that the run's spec names. `target`: default: the run's own."""
        asked = requests.body(
            DeployBody, name=name, run=run, step=step, weight=weight, canary=canary, keep_s=keep_s, feedback=feedback,
            engine=engine, target=target,
        )  # fmt: skip
        return await self.call(requests.deploy(asked))

    async def deploy_online(self, server: str, *, name: str) -> DeploymentInfo:
        """Put an online server behind a new name. `server`: as the control server's operator has named it; the operator
        alone may ask for it."""
        return await self.call(requests.deploy(requests.body(DeployBody, name=name, online=server)))

    async def deployments(self) -> list[DeploymentInfo]:
        return (await self.call(requests.deployments())).items

    async def deployment(self, name: str) -> DeploymentInfo:
        return await self.call(requests.deployment(name))

    async def promote(self, name: str, revision: int) -> DeploymentInfo:
        """Give all requests of a name to one revision, which must answer already."""
        return await self.call(requests.promote(name, revision))

    async def rollback(self, name: str) -> DeploymentInfo:
        """Take the canary away, if there is one; otherwise undo the last promote."""
        return await self.call(requests.rollback(name))

    async def undeploy(self, name: str) -> DeploymentInfo:
        """Take a name away; what its replicas have begun is answered."""
        return await self.call(requests.undeploy(name))

    async def push_environment(
        self,
        wheel: str | Path,
        *,
        project: str = "",
        build: Mapping[str, str] | None = None,
        checks: Mapping[str, int | float | bool | str] | None = None,
    ) -> PackageVersionInfo:
        """Push a wheel as a version of a package of environments. The same file again changes nothing. `build`,
        `checks`: how it was made, and what was measured, for its signed provenance."""
        return await self.call(requests.push_package(push_body(wheel, project, build or {}, checks or {})))

    async def environments(self) -> list[PackageInfo]:
        """Return the packages of environments that the key may see."""
        return (await self.call(requests.packages())).items

    async def environment(self, name: str) -> PackageInfo:
        """Return the package `ORG/NAME`, and its versions."""
        return await self.call(requests.package(package_name(name).distribution))

    async def yank_environment(self, name: str, *, why: str = "", undo: bool = False) -> PackageVersionInfo:
        """Take `ORG/NAME==VERSION` out of what is chosen by default; `undo`: put it back."""
        found = named(name)
        body = requests.body(YankBody, version=found.version, why=why, undo=undo)
        return await self.call(requests.yank(found.distribution, body))

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

    async def keys(self) -> list[KeyInfo]:
        return (await self.call(requests.keys())).items

    async def make_key(
        self, name: str, scopes: list[Scope], *, project: str = "", org: str = "", expires_at: int = 0
    ) -> KeyInfo:
        """Make a key; the answer alone has the key itself."""
        body = requests.body(KeyBody, name=name, scopes=scopes, project=project, org=org, expires_at=expires_at)
        return await self.call(requests.make_key(body))

    async def revoke_key(self, key_id: str) -> KeyInfo:
        return await self.call(requests.revoke_key(key_id))

    async def secrets(self) -> list[SecretInfo]:
        """Return the secrets, without their values."""
        return (await self.call(requests.secrets())).items

    async def set_secret(self, name: str, value: str, *, project: str = "") -> SecretInfo:
        """Make a secret, or give it a new value. `project`: only its runs get it; default: every project's."""
        return await self.call(requests.set_secret(requests.body(SecretBody, name=name, value=value, project=project)))

    async def delete_secret(self, name: str, *, project: str = "") -> SecretInfo:
        found = [each for each in await self.secrets() if (each.name, each.project) == (name, project)]
        if not found:
            of = f" of project '{project}'" if project else ""
            raise ControlNotKnown(f"there is no secret '{name}'{of}", status=404, field="secret")
        return await self.call(requests.delete_secret(found[0].id))

    async def audit(self) -> AsyncIterator[AuditInfo]:
        """Yield who did what, the oldest first."""
        after = ""
        while True:
            page = await self.call(requests.audit(after))
            for each in page.items:
                yield each
            if not (after := page.next):
                return

    async def projects(self) -> list[ProjectInfo]:
        return (await self.call(requests.projects())).items

    async def put_project(
        self, name: str, *, budget_usd: float | None = None, max_live_runs: int | None = None
    ) -> ProjectInfo:
        """Make a project, or change what is given of the one of this name. 0: no limit."""
        body = requests.body(ProjectBody, name=name, budget_usd=budget_usd, max_live_runs=max_live_runs)
        return await self.call(requests.put_project(body))

    async def make_org(self, name: str) -> OrgInfo:
        return await self.call(requests.make_org(name))

    # --- requests

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


class AsyncRemoteRun:
    """A run on a control server."""

    def __init__(self, server: AsyncTandem, run_id: str) -> None:
        self.server, self.id = server, run_id

    async def info(self) -> RunInfo:
        return await self.server.call(requests.run(self.id))

    async def cancel(self, *, save: bool = False) -> RunInfo:
        """Ask it to end. `save`: save a checkpoint first."""
        return await self.server.call(requests.cancel(self.id, save))

    async def resume(self, *, max_cost_usd: float | None = None) -> RunInfo:
        """Queue it again. `max_cost_usd`: what it may cost, with what it has cost already; default: as before."""
        return await self.server.call(requests.resume(self.id, max_cost_usd))

    async def attempts(self) -> list[AttemptInfo]:
        return (await self.server.call(requests.attempts(self.id))).items

    async def events(self, after: int = 0) -> list[EventInfo]:
        """Return the events so far, after a number."""
        found: list[EventInfo] = []
        while True:
            page = await self.server.call(requests.events(self.id, after))
            found += page.items
            if not page.next:
                return found
            after = int(page.next)

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

    async def files(self) -> list[FileInfo]:
        return (await self.server.call(requests.files(self.id))).items

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
