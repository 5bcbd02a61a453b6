"""What a caller may ask of a control server and of a run, once for both clients.

An operation yields its requests one after another, is sent the answer of each, and returns its result. It is a method
of each client: the one of blocking.py sends the requests within the call, the one of waiting.py in a coroutine.

server.keys()  ->  operation.__get__  ->  server.do(steps)  <->  steps: yield a Call, take its answer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from tandem.client import requests
from tandem.client.index import named, push_body
from tandem.client.place import Place, find_place
from tandem.client.requests import Call, Reply, get, part, post
from tandem.errors import ControlNotKnown, SpecError
from tandem.shapes.base import Asked
from tandem.shapes.deployments import DeployBody, DeploymentInfo, DeploymentList, PromoteBody
from tandem.shapes.packages import PackageInfo, PackageList, PackageVersionInfo, YankBody
from tandem.shapes.plans import PROMPT_TOKENS, ROW_TOKENS, PlanBody, PlanInfo
from tandem.shapes.runs import (
    AttemptInfo,
    AttemptList,
    CancelBody,
    EventInfo,
    EventPage,
    FileInfo,
    FileList,
    KeyBody,
    KeyInfo,
    KeyList,
    Me,
    OrgBody,
    OrgInfo,
    ProjectBody,
    ProjectInfo,
    ProjectList,
    ResumeBody,
    RunInfo,
    RunPage,
    Scope,
    SecretBody,
    SecretInfo,
    SecretList,
    SubmitBody,
    TargetInfo,
    TargetList,
)
from tandem.spec.package_names import package_name

P = ParamSpec("P")
Result = TypeVar("Result")
RunT = TypeVar("RunT")
Steps = Generator[Call[Any], Any, Result]
"""An operation on its way: it yields requests, is sent their answers, and returns its result."""


class Blocking(ABC):
    """Its operations return their results."""

    @abstractmethod
    def do(self, steps: Steps[Result]) -> Result:
        """Send the requests of an operation, each until it is answered, and return its result."""


class Waiting(ABC):
    """Its operations are awaited."""

    @abstractmethod
    async def do(self, steps: Steps[Result]) -> Result:
        """Send the requests of an operation, each until it is answered, and return its result."""


class operation(Generic[P, Result]):
    """Makes a method of its client of a function that returns steps."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[Result]]) -> None:
        self._steps = steps
        self.__name__, self.__doc__ = steps.__name__, steps.__doc__

    @overload
    def __get__(self, caller: Blocking, owner: type) -> Callable[P, Result]: ...
    @overload
    def __get__(self, caller: Waiting, owner: type) -> Callable[P, Coroutine[Any, Any, Result]]: ...
    @overload
    def __get__(self, caller: None, owner: type) -> Self: ...
    def __get__(self, caller: Blocking | Waiting | None, owner: type) -> Any:
        if caller is None:
            return self

        def begun(*values: P.args, **named: P.kwargs) -> Steps[Result]:  # a wrong value is an error of the await, too
            return (yield from self._steps(caller, *values, **named))

        @wraps(self._steps)
        def do(*values: P.args, **named: P.kwargs) -> Any:
            return caller.do(begun(*values, **named))

        return do


def _ask(call: Call[Reply]) -> Steps[Reply]:
    return (yield call)


class ServerOperations(ABC, Generic[RunT]):
    """A control server. Without `url`: the one that TANDEM_CONTROL or ~/.config/tandem/control.toml names."""

    def __init__(self, url: str = "", key: str = "", *, patience_s: float = requests.PATIENCE_S) -> None:
        import httpx

        place = Place(url.rstrip("/"), key) if url else find_place()
        if place is None:
            raise SpecError(
                "no control server is configured: use `tandem login URL`, or set TANDEM_CONTROL and TANDEM_CONTROL_KEY"
            )
        self._place, self.url, self._patience_s = place, place.url, patience_s
        self._connection: dict[str, Any] = {
            "base_url": place.url, "headers": {"Authorization": f"Bearer {place.key}"}, "follow_redirects": False,
            "timeout": httpx.Timeout(requests.READ_S, connect=requests.CONNECT_S),
            "trust_env": False,  # no proxy from environment variables: it would see the key
        }  # fmt: skip

    @abstractmethod
    def run(self, run_id: str) -> RunT:
        """Return a run by its id; it is asked for when it is used."""

    @operation
    def me(self) -> Steps[Me]:
        return _ask(get("/api/me", Me))

    @operation
    def targets(self) -> Steps[list[TargetInfo]]:
        return (yield from _ask(get("/api/targets", TargetList))).items

    @operation
    def plan(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        target: str,
        gpu: str = "",
        prompt_tokens: int = PROMPT_TOKENS,
        row_tokens: int = ROW_TOKENS,
    ) -> Steps[PlanInfo]:
        """Return what a spec needs on each offer of a target: memory, seconds and cost. Nothing is started. The server
        reads no data: the lengths are those that you give. `gpu`: plan for this card in place of the target's."""
        body = requests.body(
            PlanBody, spec_toml=requests.spec_text(spec), target=target, gpu=gpu, prompt_tokens=prompt_tokens,
            row_tokens=row_tokens,
        )  # fmt: skip
        return _ask(Call("POST", "/api/plans", PlanInfo, body, {"Content-Type": "application/json"}))

    @operation
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
    ) -> Steps[RunT]:
        """Queue a run of a spec: a TOML file's path, or a dict of the same tables."""
        body = requests.body(
            SubmitBody, spec_toml=requests.spec_text(spec), target=target, max_cost_usd=max_cost_usd, name=name,
            project=project, group=group, retries=retries, secrets=list(secrets),
        )  # fmt: skip
        return self.run((yield from _ask(post("/api/runs", RunInfo, body))).id)

    @operation
    def runs(self, *, state: str = "", project: str = "", group: str = "", most: int = 200) -> Steps[list[RunInfo]]:
        """Return runs, the newest first."""
        found: list[RunInfo] = []
        page = RunPage(items=[], next="")
        chosen = {"state": state, "project": project, "group": group}
        while len(found) < most:
            limit = min(200, most - len(found))
            page = yield from _ask(get("/api/runs", RunPage, **chosen, before=page.next, limit=limit))
            found += page.items
            if not page.next:
                break
        return found

    @operation
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
    ) -> Steps[DeploymentInfo]:
        """Put a checkpoint of a run behind a name, as its next revision. `canary`: its share of the requests while it
        is tried. `keep_s`: end its replica after so long without a request; 0: never. `feedback`: keep its chats, and
        take thumbs. `engine`: vllm: the vLLM that the run's spec names. `target`: default: the run's own."""
        body = requests.body(
            DeployBody, name=name, run=run, step=step, weight=weight, canary=canary, keep_s=keep_s, feedback=feedback,
            engine=engine, target=target,
        )  # fmt: skip
        return _ask(post("/api/deployments", DeploymentInfo, body))

    @operation
    def deploy_online(self, server: str, *, name: str) -> Steps[DeploymentInfo]:
        """Put an online server behind a new name. `server`: as the control server's operator has named it; the operator
        alone may ask for it."""
        return _ask(post("/api/deployments", DeploymentInfo, requests.body(DeployBody, name=name, online=server)))

    @operation
    def deployments(self) -> Steps[list[DeploymentInfo]]:
        return (yield from _ask(get("/api/deployments", DeploymentList))).items

    @operation
    def deployment(self, name: str) -> Steps[DeploymentInfo]:
        return _ask(get(f"/api/deployments/{part(name)}", DeploymentInfo))

    @operation
    def promote(self, name: str, revision: int) -> Steps[DeploymentInfo]:
        """Give all requests of a name to one revision, which must answer already."""
        body = requests.body(PromoteBody, revision=revision)
        return _ask(post(f"/api/deployments/{part(name)}/promote", DeploymentInfo, body))

    @operation
    def rollback(self, name: str) -> Steps[DeploymentInfo]:
        """Take the canary away, if there is one; otherwise undo the last promote."""
        return _ask(post(f"/api/deployments/{part(name)}/rollback", DeploymentInfo, Asked()))

    @operation
    def undeploy(self, name: str) -> Steps[DeploymentInfo]:
        """Take a name away; what its replicas have begun is answered."""
        return _ask(post(f"/api/deployments/{part(name)}/undeploy", DeploymentInfo, Asked()))

    @operation
    def push_environment(
        self,
        wheel: str | Path,
        *,
        project: str = "",
        build: Mapping[str, str] | None = None,
        checks: Mapping[str, int | float | bool | str] | None = None,
    ) -> Steps[PackageVersionInfo]:
        """Push a wheel as a version of a package of environments. The same file again changes nothing. `build`,
        `checks`: how it was made, and what was measured, for its signed provenance."""
        body = push_body(wheel, project, build or {}, checks or {})
        return _ask(post("/api/packages", PackageVersionInfo, body))

    @operation
    def environments(self) -> Steps[list[PackageInfo]]:
        """Return the packages of environments that the key may see."""
        return (yield from _ask(get("/api/packages", PackageList))).items

    @operation
    def environment(self, name: str) -> Steps[PackageInfo]:
        """Return the package `ORG/NAME`, and its versions."""
        return _ask(get(f"/api/packages/{part(package_name(name).distribution)}", PackageInfo))

    @operation
    def yank_environment(self, name: str, *, why: str = "", undo: bool = False) -> Steps[PackageVersionInfo]:
        """Take `ORG/NAME==VERSION` out of what is chosen by default; `undo`: put it back."""
        found = named(name)
        body = requests.body(YankBody, version=found.version, why=why, undo=undo)
        return _ask(post(f"/api/packages/{part(found.distribution)}/yank", PackageVersionInfo, body))

    @operation
    def keys(self) -> Steps[list[KeyInfo]]:
        return (yield from _ask(get("/api/keys", KeyList))).items

    @operation
    def make_key(
        self, name: str, scopes: list[Scope], *, project: str = "", org: str = "", expires_at: int = 0
    ) -> Steps[KeyInfo]:
        """Make a key; the answer alone has the key itself."""
        body = requests.body(KeyBody, name=name, scopes=scopes, project=project, org=org, expires_at=expires_at)
        return _ask(post("/api/keys", KeyInfo, body))

    @operation
    def revoke_key(self, key_id: str) -> Steps[KeyInfo]:
        return _ask(post(f"/api/keys/{part(key_id)}/revoke", KeyInfo, Asked()))

    @operation
    def secrets(self) -> Steps[list[SecretInfo]]:
        """Return the secrets, without their values."""
        return (yield from _ask(get("/api/secrets", SecretList))).items

    @operation
    def set_secret(self, name: str, value: str, *, project: str = "") -> Steps[SecretInfo]:
        """Make a secret, or give it a new value. `project`: only its runs get it; default: every project's."""
        body = requests.body(SecretBody, name=name, value=value, project=project)
        return _ask(post("/api/secrets", SecretInfo, body))

    @operation
    def delete_secret(self, name: str, *, project: str = "") -> Steps[SecretInfo]:
        there = (yield from _ask(get("/api/secrets", SecretList))).items
        found = [each for each in there if (each.name, each.project) == (name, project)]
        if not found:
            of = f" of project '{project}'" if project else ""
            raise ControlNotKnown(f"there is no secret '{name}'{of}", status=404, field="secret")
        return (yield from _ask(post(f"/api/secrets/{part(found[0].id)}/delete", SecretInfo, Asked())))

    @operation
    def projects(self) -> Steps[list[ProjectInfo]]:
        return (yield from _ask(get("/api/projects", ProjectList))).items

    @operation
    def put_project(
        self, name: str, *, budget_usd: float | None = None, max_live_runs: int | None = None
    ) -> Steps[ProjectInfo]:
        """Make a project, or change what is given of the one of this name. 0: no limit."""
        body = requests.body(ProjectBody, name=name, budget_usd=budget_usd, max_live_runs=max_live_runs)
        return _ask(post("/api/projects", ProjectInfo, body))

    @operation
    def make_org(self, name: str) -> Steps[OrgInfo]:
        return _ask(post("/api/orgs", OrgInfo, requests.body(OrgBody, name=name)))


class RunOperations:
    """A run on a control server."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id

    @operation
    def info(self) -> Steps[RunInfo]:
        return _ask(get(self._path(), RunInfo))

    @operation
    def cancel(self, *, save: bool = False) -> Steps[RunInfo]:
        """Ask it to end. `save`: save a checkpoint first."""
        return _ask(post(self._path("/cancel"), RunInfo, CancelBody(save=save)))

    @operation
    def resume(self, *, max_cost_usd: float | None = None) -> Steps[RunInfo]:
        """Queue it again. `max_cost_usd`: what it may cost, with what it has cost already; default: as before."""
        return _ask(post(self._path("/resume"), RunInfo, requests.body(ResumeBody, max_cost_usd=max_cost_usd)))

    @operation
    def attempts(self) -> Steps[list[AttemptInfo]]:
        return (yield from _ask(get(self._path("/attempts"), AttemptList))).items

    @operation
    def events(self, after: int = 0) -> Steps[list[EventInfo]]:
        """Return the events so far, after a number."""
        found: list[EventInfo] = []
        while True:
            page = yield from _ask(get(self._path("/events"), EventPage, after=after))
            found += page.items
            if not page.next:
                return found
            after = int(page.next)

    @operation
    def files(self) -> Steps[list[FileInfo]]:
        return (yield from _ask(get(self._path("/files"), FileList))).items

    def _path(self, what: str = "") -> str:
        return f"/api/runs/{part(self.id)}{what}"
