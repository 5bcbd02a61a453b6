"""Between a user and the control plane: runs, keys, projects and orgs.

Times are milliseconds since 1970, in UTC. Money is US dollars. A list is a page: `next` goes into `before` or `after`
of the next request; empty: it was the last.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from tandem.shapes.base import Answer, Asked

RUN_ID = re.compile(r"run_[a-z2-7]{26}")
ENDED = ("succeeded", "failed", "cancelled", "stopped")


def _free_name(name: str) -> str:
    if name.startswith(("TANDEM_", "PYTHON", "LD_")) or name in ("PATH", "HOME"):
        raise ValueError("is a variable that the machine or Tandem sets; take another name")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$")]
Scope = Literal["runs:read", "runs:write", "keys", "secrets", "deploy", "chat", "env", "admin"]
"""runs:read: see runs, and install environments. runs:write: submit, cancel, resume. keys: make and revoke keys.
secrets: set and delete secrets, and list their names. deploy: put models behind names. chat: ask them. env: push and
yank environments. admin: make projects, and read the audit log."""
SCOPES: tuple[Scope, ...] = ("runs:read", "runs:write", "keys", "secrets", "deploy", "chat", "env", "admin")
SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,99}$"), AfterValidator(_free_name)]
SecretValue = Annotated[str, StringConstraints(pattern=r"^[^\x00]+$", max_length=30_000)]
"""Of an environment variable, which cannot hold the character 0."""
Usd = Annotated[float, Field(ge=0, le=1e9)]
Millis = Annotated[int, Field(ge=0, lt=2**53)]


class SubmitBody(Asked):
    """A run to queue. The spec is the very one that runs locally."""

    spec_toml: str = Field(min_length=1, max_length=1_000_000)
    target: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    """A name of the server's file of targets."""
    name: Name | Literal[""] = ""
    """Default: the spec's own name."""
    project: Name = "default"
    group: Name | Literal[""] = ""
    max_cost_usd: Usd = 0.0
    """The run is stopped before it costs more; 0: no limit."""
    retries: int = Field(default=3, ge=0, le=100)
    """Further attempts after failures that may pass."""
    secrets: list[SecretName] = Field(default=[], max_length=64)
    """The names of secrets: variables of the trainer's environment."""


class CancelBody(Asked):
    """`save`: save a checkpoint first, which may take minutes; the run is `stopped` then and can be resumed."""

    save: bool = False


class ResumeBody(Asked):
    """Queue a run again that stopped, failed or was cancelled."""

    max_cost_usd: Usd | None = None
    """What it may cost at most, with what it has cost already; default: as before."""


class RunInfo(Answer):
    """A run, and what its mirrored files say of it."""

    id: str
    name: str
    project: str
    group: str
    target: str
    state: Literal["queued", "starting", "running", "waiting", "succeeded", "failed", "cancelled", "stopped"]
    want: Literal["run", "stop", "cancel"]
    why: str
    at: int
    ended_at: int
    attempt: int
    max_cost_usd: float
    cost_usd: float
    stage: str = ""
    step: int = 0
    steps_total: int = 0
    verdict: str = ""
    error: str = ""
    secrets: tuple[str, ...] = ()
    """The names of the secrets that its trainer gets."""


class RunPage(Answer):
    items: list[RunInfo]
    next: str = ""


class EventInfo(Answer):
    """What happened to a run, numbered from 1."""

    n: int
    at: int
    kind: str
    body: dict[str, Any]


class EventPage(Answer):
    items: list[EventInfo]
    next: str = ""


class AttemptInfo(Answer):
    """One execution of a run."""

    n: int
    state: str
    target: str
    at: int
    claimed_at: int
    ended_at: int
    closed_at: int
    why: str


class AttemptList(Answer):
    items: list[AttemptInfo]


class FileInfo(Answer):
    """A mirrored file. Bytes that were read stay right as long as the generation is the same."""

    file: str
    generation: int
    size: int


class FileList(Answer):
    items: list[FileInfo]


class OfferInfo(Answer):
    """What a target offers: now, later (`fits` alone), or never, and why not."""

    name: str
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gib: float = 0.0
    cpus: int = 0
    memory_gib: float = 0.0
    hosts: int = 1
    usd_per_hour: float = 0.0
    now: bool = True
    fits: bool = True
    why_not: str = ""


class TargetInfo(Answer):
    name: str
    kind: str
    offers: list[OfferInfo]
    error: str = ""


class TargetList(Answer):
    items: list[TargetInfo]


class KeyBody(Asked):
    """A key to make. It cannot do more than the key that makes it."""

    name: Name
    scopes: list[Scope] = Field(min_length=1, max_length=len(SCOPES))
    project: Name | Literal[""] = ""
    """The only project that it may see; empty: all of its org."""
    org: str = Field(default="", pattern=r"^(org_[a-z2-7]{26})?$")
    """An org's id, for the operator; empty: the caller's own."""
    expires_at: Millis = 0


class KeyInfo(Answer):
    id: str
    name: str
    scopes: list[Scope]
    project: str
    at: int
    expires_at: int
    revoked_at: int
    key: str = ""
    """The key itself: only in the answer that made it."""


class KeyList(Answer):
    items: list[KeyInfo]


class SecretBody(Asked):
    """A secret to make, or a new value for the one of this name."""

    name: SecretName
    """Of the variable in the trainer's environment."""
    value: SecretValue = Field(repr=False)
    project: Name | Literal[""] = ""
    """The only project whose runs get it; empty: every project of the org."""


class SecretInfo(Answer):
    """A secret, without its value, which is in no answer."""

    id: str
    name: str
    project: str
    at: int
    """When its value was set last."""
    changed_by: str
    version: int
    """Counts its values, from 1."""


class SecretList(Answer):
    items: list[SecretInfo]


class ProjectBody(Asked):
    """A project to make, or to change if there is one of this name."""

    name: Name
    budget_usd: Usd | None = None
    """0: no limit; default: as before, and no limit for a new project. The same holds for `max_live_runs`."""
    max_live_runs: int | None = Field(default=None, ge=0, le=10**6)


class ProjectInfo(Answer):
    id: str
    name: str
    budget_usd: float
    max_live_runs: int
    spent_usd: float


class ProjectList(Answer):
    items: list[ProjectInfo]


class AuditInfo(Answer):
    """One row of the audit log."""

    n: int
    """Of the whole server: those of other orgs are left out."""
    at: int
    actor: str
    """The id of a key or of an attempt, `operator`, or the user of a command."""
    action: str
    item: str
    """The id of what was made or changed."""
    told: dict[str, Any]
    mac: str


class AuditPage(Answer):
    items: list[AuditInfo]
    next: str = ""


class OrgBody(Asked):
    name: Name


class OrgInfo(Answer):
    id: str
    name: str


class Me(Answer):
    """Who the caller is."""

    key: str
    org: str
    org_name: str
    project: str
    scopes: list[Scope]
    operator: bool
    """Whether this is the token of the data directory, which may make orgs."""
    signing_key: str = ""
    """The public key of the server's provenance of environments: `tandem login` keeps it."""


class UsageInfo(Answer):
    """What one attempt used. `key` is unique for all time, so that adding a row twice can be seen."""

    key: str
    run: str
    run_name: str = ""
    project: str = ""
    kind: str
    began: int
    """When a machine claimed the attempt."""
    ended: int
    """When its agent said that it ended; without that word, when it was closed or its lease ran out."""
    usd: float


class UsagePage(Answer):
    items: list[UsageInfo]
    next: str = ""
