"""The blocking client of a control server. `waiting.py` has the same for asyncio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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


class Tandem(AbstractContextManager["Tandem"]):
    """A control server. Without `url`: the one that TANDEM_CONTROL or ~/.config/tandem/control.toml names."""

    def __init__(self, url: str = "", key: str = "", *, patience_s: float = requests.PATIENCE_S) -> None:
        import httpx

        place = Place(url.rstrip("/"), key) if url else find_place()
        if place is None:
            raise SpecError(
                "no control server is configured: use `tandem login URL`, or set TANDEM_CONTROL and TANDEM_CONTROL_KEY"
            )
        self._place, self.url, self._patience_s = place, place.url, patience_s
        self._http = httpx.Client(
            base_url=place.url, headers={"Authorization": f"Bearer {place.key}"}, follow_redirects=False,
            timeout=httpx.Timeout(requests.READ_S, connect=requests.CONNECT_S),
            trust_env=False,  # no proxy from environment variables: it would see the key
        )  # fmt: skip

    def close(self) -> None:
        self._http.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def me(self) -> Me:
        return self.call(requests.me())

    def targets(self) -> list[TargetInfo]:
        return self.call(requests.targets()).items

    def plan(
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
        return self.call(requests.plan(body))

    def submit(
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
    ) -> RemoteRun:
        """Queue a run of a spec: a TOML file's path, or a dict of the same tables."""
        body = requests.body(
            SubmitBody, spec_toml=requests.spec_text(spec), target=target, max_cost_usd=max_cost_usd, name=name,
            project=project, group=group, retries=retries, secrets=list(secrets),
        )  # fmt: skip
        return RemoteRun(self, self.call(requests.submit(body)).id)

    def run(self, run_id: str) -> RemoteRun:
        """Return a run by its id; it is asked for when it is used."""
        return RemoteRun(self, run_id)

    def runs(self, *, state: str = "", project: str = "", group: str = "", most: int = 200) -> list[RunInfo]:
        """Return runs, the newest first."""
        found: list[RunInfo] = []
        page = RunPage(items=[], next="")
        while len(found) < most:
            limit = min(200, most - len(found))
            asked = requests.runs(state=state, project=project, group=group, before=page.next, limit=limit)
            page = self.call(asked)
            found += page.items
            if not page.next:
                break
        return found

    def deploy(
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
        return self.call(requests.deploy(asked))

    def deploy_online(self, server: str, *, name: str) -> DeploymentInfo:
        """Put an online server behind a new name. `server`: as the control server's operator has named it; the operator
        alone may ask for it."""
        return self.call(requests.deploy(requests.body(DeployBody, name=name, online=server)))

    def deployments(self) -> list[DeploymentInfo]:
        return self.call(requests.deployments()).items

    def deployment(self, name: str) -> DeploymentInfo:
        return self.call(requests.deployment(name))

    def promote(self, name: str, revision: int) -> DeploymentInfo:
        """Give all requests of a name to one revision, which must answer already."""
        return self.call(requests.promote(name, revision))

    def rollback(self, name: str) -> DeploymentInfo:
        """Take the canary away, if there is one; otherwise undo the last promote."""
        return self.call(requests.rollback(name))

    def undeploy(self, name: str) -> DeploymentInfo:
        """Take a name away; what its replicas have begun is answered."""
        return self.call(requests.undeploy(name))

    def push_environment(
        self,
        wheel: str | Path,
        *,
        project: str = "",
        build: Mapping[str, str] | None = None,
        checks: Mapping[str, int | float | bool | str] | None = None,
    ) -> PackageVersionInfo:
        """Push a wheel as a version of a package of environments. The same file again changes nothing. `build`,
        `checks`: how it was made, and what was measured, for its signed provenance."""
        return self.call(requests.push_package(push_body(wheel, project, build or {}, checks or {})))

    def environments(self) -> list[PackageInfo]:
        """Return the packages of environments that the key may see."""
        return (self.call(requests.packages())).items

    def environment(self, name: str) -> PackageInfo:
        """Return the package `ORG/NAME`, and its versions."""
        return self.call(requests.package(package_name(name).distribution))

    def yank_environment(self, name: str, *, why: str = "", undo: bool = False) -> PackageVersionInfo:
        """Take `ORG/NAME==VERSION` out of what is chosen by default; `undo`: put it back."""
        found = named(name)
        body = requests.body(YankBody, version=found.version, why=why, undo=undo)
        return self.call(requests.yank(found.distribution, body))

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

    def keys(self) -> list[KeyInfo]:
        return self.call(requests.keys()).items

    def make_key(
        self, name: str, scopes: list[Scope], *, project: str = "", org: str = "", expires_at: int = 0
    ) -> KeyInfo:
        """Make a key; the answer alone has the key itself."""
        body = requests.body(KeyBody, name=name, scopes=scopes, project=project, org=org, expires_at=expires_at)
        return self.call(requests.make_key(body))

    def revoke_key(self, key_id: str) -> KeyInfo:
        return self.call(requests.revoke_key(key_id))

    def secrets(self) -> list[SecretInfo]:
        """Return the secrets, without their values."""
        return self.call(requests.secrets()).items

    def set_secret(self, name: str, value: str, *, project: str = "") -> SecretInfo:
        """Make a secret, or give it a new value. `project`: only its runs get it; default: every project's."""
        return self.call(requests.set_secret(requests.body(SecretBody, name=name, value=value, project=project)))

    def delete_secret(self, name: str, *, project: str = "") -> SecretInfo:
        found = [each for each in self.secrets() if (each.name, each.project) == (name, project)]
        if not found:
            of = f" of project '{project}'" if project else ""
            raise ControlNotKnown(f"there is no secret '{name}'{of}", status=404, field="secret")
        return self.call(requests.delete_secret(found[0].id))

    def audit(self) -> Iterator[AuditInfo]:
        """Yield who did what, the oldest first."""
        after = ""
        while True:
            page = self.call(requests.audit(after))
            yield from page.items
            if not (after := page.next):
                return

    def projects(self) -> list[ProjectInfo]:
        return self.call(requests.projects()).items

    def put_project(
        self, name: str, *, budget_usd: float | None = None, max_live_runs: int | None = None
    ) -> ProjectInfo:
        """Make a project, or change what is given of the one of this name. 0: no limit."""
        body = requests.body(ProjectBody, name=name, budget_usd=budget_usd, max_live_runs=max_live_runs)
        return self.call(requests.put_project(body))

    def make_org(self, name: str) -> OrgInfo:
        return self.call(requests.make_org(name))

    # --- requests

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


class RemoteRun:
    """A run on a control server."""

    def __init__(self, server: Tandem, run_id: str) -> None:
        self.server, self.id = server, run_id

    def info(self) -> RunInfo:
        return self.server.call(requests.run(self.id))

    def cancel(self, *, save: bool = False) -> RunInfo:
        """Ask it to end. `save`: save a checkpoint first."""
        return self.server.call(requests.cancel(self.id, save))

    def resume(self, *, max_cost_usd: float | None = None) -> RunInfo:
        """Queue it again. `max_cost_usd`: what it may cost, with what it has cost already; default: as before."""
        return self.server.call(requests.resume(self.id, max_cost_usd))

    def attempts(self) -> list[AttemptInfo]:
        return self.server.call(requests.attempts(self.id)).items

    def events(self, after: int = 0) -> list[EventInfo]:
        """Return the events so far, after a number."""
        found: list[EventInfo] = []
        while True:
            page = self.server.call(requests.events(self.id, after))
            found += page.items
            if not page.next:
                return found
            after = int(page.next)

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

    def files(self) -> list[FileInfo]:
        return self.server.call(requests.files(self.id)).items

    def read(self, file: str, offset: int = 0, limit: int = 4 * 2**20) -> tuple[bytes, int, int]:
        """Return bytes of a mirrored file, its generation and its size."""
        answer = self.server.answered("GET", requests.file_path(self.id, file, offset, limit))
        return answer.content, int(answer.headers["x-generation"]), int(answer.headers["x-size"])

    def pull(self, directory: str | Path) -> Pulled:
        """Bring the mirror into a directory, which every command for run directories then reads. Only what is new
        travels."""
        return pull(self.files, self.read, Path(directory))
