"""What is sent to a control server, what an answer means, and when to send again. No I/O: both clients share it.

A write carries a key of its own, made once, so that sending it again after a lost answer does nothing twice.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote, urlencode

from pydantic import ValidationError

from tandem.errors import (
    ControlConflict,
    ControlError,
    ControlInvalid,
    ControlNotAllowed,
    ControlNotKnown,
    ControlSilent,
    SpecError,
)
from tandem.io.retry_after import retry_after_s
from tandem.shapes.base import Answer, Asked
from tandem.shapes.deployments import DeployBody, DeploymentInfo, DeploymentList, PromoteBody
from tandem.shapes.packages import PackageInfo, PackageList, PackageVersionInfo, PushBody, YankBody
from tandem.shapes.plans import PlanBody, PlanInfo
from tandem.shapes.runs import (
    ENDED,
    AttemptList,
    AuditPage,
    CancelBody,
    EventInfo,
    EventPage,
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
    SecretBody,
    SecretInfo,
    SecretList,
    SubmitBody,
    TargetList,
    UsagePage,
)

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
PATIENCE_S = 60.0
"""How long a server that does not answer is asked again, before ControlSilent."""
READ_S, CONNECT_S = 60.0, 5.0
STREAM_READ_S = 30.0
"""A stream of events has at least a comment every ten seconds."""
_FIRST_WAIT_S, _MOST_WAIT_S = 0.2, 5.0

Reply = TypeVar("Reply", bound=Answer)
Body = TypeVar("Body", bound=Asked)


@dataclass(frozen=True)
class Call(Generic[Reply]):
    """One request; `reply`: the model of its answer."""

    method: str
    path: str
    reply: type[Reply]
    body: Asked | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def content(self) -> bytes:
        return b"" if self.body is None else self.body.model_dump_json().encode()


def _get(path: str, reply: type[Reply], **query: object) -> Call[Reply]:
    asked = {name: str(value) for name, value in query.items() if value not in ("", None)}
    return Call("GET", f"{path}?{urlencode(asked)}" if asked else path, reply)


def _post(path: str, reply: type[Reply], body: Asked) -> Call[Reply]:
    headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
    return Call("POST", path, reply, body, headers)


def me() -> Call[Me]:
    return _get("/api/me", Me)


def targets() -> Call[TargetList]:
    return _get("/api/targets", TargetList)


def plan(body: PlanBody) -> Call[PlanInfo]:
    return Call("POST", "/api/plans", PlanInfo, body, {"Content-Type": "application/json"})


def submit(body: SubmitBody) -> Call[RunInfo]:
    return _post("/api/runs", RunInfo, body)


def runs(*, state: str, project: str, group: str, before: str, limit: int) -> Call[RunPage]:
    return _get("/api/runs", RunPage, state=state, project=project, group=group, before=before, limit=limit)


def run(run_id: str) -> Call[RunInfo]:
    return _get(f"/api/runs/{_part(run_id)}", RunInfo)


def cancel(run_id: str, save: bool) -> Call[RunInfo]:
    return _post(f"/api/runs/{_part(run_id)}/cancel", RunInfo, CancelBody(save=save))


def resume(run_id: str, max_cost_usd: float | None) -> Call[RunInfo]:
    return _post(f"/api/runs/{_part(run_id)}/resume", RunInfo, body(ResumeBody, max_cost_usd=max_cost_usd))


def events(run_id: str, after: int) -> Call[EventPage]:
    return _get(f"/api/runs/{_part(run_id)}/events", EventPage, after=after)


def attempts(run_id: str) -> Call[AttemptList]:
    return _get(f"/api/runs/{_part(run_id)}/attempts", AttemptList)


def files(run_id: str) -> Call[FileList]:
    return _get(f"/api/runs/{_part(run_id)}/files", FileList)


def usage(after: str, since: int, until: int) -> Call[UsagePage]:
    return _get("/api/usage", UsagePage, after=after, since=since or "", until=until or "")


def keys() -> Call[KeyList]:
    return _get("/api/keys", KeyList)


def make_key(body: KeyBody) -> Call[KeyInfo]:
    return _post("/api/keys", KeyInfo, body)


def revoke_key(key_id: str) -> Call[KeyInfo]:
    return _post(f"/api/keys/{_part(key_id)}/revoke", KeyInfo, Asked())


def audit(after: str) -> Call[AuditPage]:
    return _get("/api/audit", AuditPage, after=after)


def secrets() -> Call[SecretList]:
    return _get("/api/secrets", SecretList)


def set_secret(body: SecretBody) -> Call[SecretInfo]:
    return _post("/api/secrets", SecretInfo, body)


def delete_secret(secret_id: str) -> Call[SecretInfo]:
    return _post(f"/api/secrets/{_part(secret_id)}/delete", SecretInfo, Asked())


def deployments() -> Call[DeploymentList]:
    return _get("/api/deployments", DeploymentList)


def deployment(name: str) -> Call[DeploymentInfo]:
    return _get(f"/api/deployments/{_part(name)}", DeploymentInfo)


def deploy(body: DeployBody) -> Call[DeploymentInfo]:
    return _post("/api/deployments", DeploymentInfo, body)


def promote(name: str, revision: int) -> Call[DeploymentInfo]:
    asked = body(PromoteBody, revision=revision)
    return _post(f"/api/deployments/{_part(name)}/promote", DeploymentInfo, asked)


def rollback(name: str) -> Call[DeploymentInfo]:
    return _post(f"/api/deployments/{_part(name)}/rollback", DeploymentInfo, Asked())


def undeploy(name: str) -> Call[DeploymentInfo]:
    return _post(f"/api/deployments/{_part(name)}/undeploy", DeploymentInfo, Asked())


def packages() -> Call[PackageList]:
    return _get("/api/packages", PackageList)


def package(distribution: str) -> Call[PackageInfo]:
    return _get(f"/api/packages/{_part(distribution)}", PackageInfo)


def push_package(body: PushBody) -> Call[PackageVersionInfo]:
    return _post("/api/packages", PackageVersionInfo, body)


def yank(distribution: str, body: YankBody) -> Call[PackageVersionInfo]:
    return _post(f"/api/packages/{_part(distribution)}/yank", PackageVersionInfo, body)


def projects() -> Call[ProjectList]:
    return _get("/api/projects", ProjectList)


def put_project(body: ProjectBody) -> Call[ProjectInfo]:
    return _post("/api/projects", ProjectInfo, body)


def make_org(name: str) -> Call[OrgInfo]:
    return _post("/api/orgs", OrgInfo, body(OrgBody, name=name))


def file_path(run_id: str, file: str, offset: int, limit: int) -> str:
    return f"/api/runs/{_part(run_id)}/files/{quote(file)}?offset={offset}&limit={limit}"


def stream_path(run_id: str) -> str:
    return f"/api/runs/{_part(run_id)}/events"


def _part(text: str) -> str:
    return quote(text, safe="")


def body(kind: type[Body], **fields: Any) -> Body:
    """Return a request's body. SpecError, which does not quote the value, if a field is wrong."""
    from tandem.spec.load import plain_message

    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SpecError(f"{'.'.join(str(part) for part in first['loc'])}: {plain_message(first)}") from None


def spec_text(spec: str | Path | Mapping[str, Any]) -> str:
    """Return a spec as TOML, checked: from a TOML file's path, or a dict of the same tables. What it leaves out stays
    left out, since the machine that trains chooses it."""
    import tomli_w

    from tandem.spec.load import as_spec

    return tomli_w.dumps(as_spec(spec).as_written())


# --- answers


def read(call: Call[Reply], content: bytes) -> Reply:
    """Return the answer of a success."""
    try:
        return call.reply.model_validate_json(content)
    except ValidationError as error:
        raise ControlError(
            f"{call.method} {call.path}: the answer is not one of a control server; is this its URL?"
        ) from error


def refusal(status: int, content: bytes) -> ControlError:
    """Return the error that an answer says."""
    try:
        error = cast("dict[str, Any]", json.loads(content)["error"])
        text, field, code = str(error["message"]), str(error.get("field", "")), str(error["code"])
    except (ValueError, KeyError, TypeError):
        text, field, code = f"the server answered with status {status}, not as a control server does", "", ""
    kinds: dict[int, type[ControlError]] = {
        401: ControlNotAllowed, 403: ControlNotAllowed, 404: ControlNotKnown, 409: ControlConflict,
        413: ControlInvalid, 422: ControlInvalid,
    }  # fmt: skip
    return kinds.get(status, ControlError)(text, status=status, field=field, code=code)


class Patience:
    """Says how long to wait before a request is sent again, and when to give up."""

    def __init__(self, seconds: float, url: str) -> None:
        self._left_s, self._url, self._wait_s = seconds, url, _FIRST_WAIT_S

    def wait_s(self, why: str, retry_after: str = "") -> float:
        """Return the seconds until the next try, which the server's Retry-After names if there is one. ControlSilent
        when the time is over, or would be by then."""
        asked = retry_after_s(retry_after) if retry_after else None
        wait_s = self._wait_s * random.uniform(0.7, 1.3) if asked is None else asked
        self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)
        self._left_s -= max(wait_s, 0.01)
        if self._left_s < 0:
            raise ControlSilent(f"{self._url} did not answer: {why}; is `tandem control serve` running there?")
        return wait_s

    def took(self, seconds: float) -> None:
        self._left_s -= seconds


# --- streams of events


class EventReader:
    """Reads server-sent events line by line, and knows where to go on."""

    def __init__(self, after: int) -> None:
        self.after = after
        self._data: list[str] = []

    def push(self, line: str) -> EventInfo | None:
        """Take a line; return the event that it completes. One that was seen already is left out."""
        if line.startswith("data:"):
            self._data.append(line[5:].lstrip())
        elif not line and self._data:
            text, self._data = "\n".join(self._data), []
            event = EventInfo.model_validate_json(text)
            if event.n > self.after:
                self.after = event.n
                return event
        return None

    def cut(self) -> None:
        """Forget an event whose end did not arrive."""
        self._data.clear()


def settled(info: RunInfo) -> bool:
    return info.state in ENDED
