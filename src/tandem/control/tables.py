"""The tables of the control plane. Ids are `<kind>_<26 characters>`; times are milliseconds since 1970, in UTC."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_ID, _NAME = String(40), String(120)


class Base(DeclarativeBase):
    pass


class Org(Base):
    """Who owns runs. Its id is in every row and in every question to the database."""

    __tablename__ = "orgs"
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(_NAME, unique=True)


class Project(Base):
    """A part of an org, with a budget of its own."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("org", "name", name="one_project_a_name"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(_NAME)
    budget_usd: Mapped[float] = mapped_column(Float)
    """What its runs may cost together; 0: no limit."""
    max_live_runs: Mapped[int] = mapped_column(Integer)
    """How many of its runs may be on their way at a time; 0: no limit."""


class Key(Base):
    """A caller's key. The key itself is shown once; the row has its SHA-256."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(_NAME)
    sha256: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    project: Mapped[str] = mapped_column(_ID)
    """The only project that it may see; empty: all of its org."""
    expires_at: Mapped[int] = mapped_column(BigInteger)
    """0: never."""
    revoked_at: Mapped[int] = mapped_column(BigInteger)


class Secret(Base):
    """A variable for the trainers of runs, sealed (sealing.py). Its value is in no answer but that to a claim."""

    __tablename__ = "secrets"
    __table_args__ = (UniqueConstraint("org", "project", "name", name="one_secret_a_name"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    project: Mapped[str] = mapped_column(_ID)
    """The only project whose runs get it; empty: every project of its org."""
    name: Mapped[str] = mapped_column(_NAME)
    at: Mapped[int] = mapped_column(BigInteger)
    """When its value was set last."""
    changed_by: Mapped[str] = mapped_column(_ID)
    version: Mapped[int] = mapped_column(Integer)
    master: Mapped[str] = mapped_column(String(16))
    wrapped: Mapped[bytes] = mapped_column(LargeBinary)
    content: Mapped[bytes] = mapped_column(LargeBinary)


class AuditRow(Base):
    """Who did what (audit.py). A trigger refuses to change or delete a row."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_org", "org", "n"),)
    n: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[int] = mapped_column(BigInteger)
    org: Mapped[str] = mapped_column(_ID)
    """Empty: of the whole server."""
    actor: Mapped[str] = mapped_column(_NAME)
    action: Mapped[str] = mapped_column(_NAME)
    item: Mapped[str] = mapped_column(_NAME)
    told: Mapped[str] = mapped_column(Text)
    """JSON, as its MAC was made of it."""
    mac: Mapped[str] = mapped_column(String(64))


class Answered(Base):
    """The answer to a write, by its caller and idempotency key, so that a repeated write gets the same answer."""

    __tablename__ = "answered"
    id: Mapped[str] = mapped_column(String(200), primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger, index=True)
    digest: Mapped[str] = mapped_column(String(64))
    """Of the request."""
    answer: Mapped[dict[str, Any]] = mapped_column(JSON)


class Run(Base):
    """A run: its spec, what its owner wants, and its state."""

    __tablename__ = "runs"
    __table_args__ = (
        Index("runs_by_state", "state"),
        Index("runs_by_org", "org", "at"),
        Index("runs_by_project", "project", "at"),
    )
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    project: Mapped[str] = mapped_column(_ID)
    name: Mapped[str] = mapped_column(_NAME)
    group: Mapped[str] = mapped_column(_NAME)
    """Runs with the same word belong together, a sweep for example; empty: none."""
    created_by: Mapped[str] = mapped_column(_ID)
    """The id of the key that submitted it."""
    spec_toml: Mapped[str] = mapped_column(Text)
    target: Mapped[str] = mapped_column(_NAME)
    usd_per_hour: Mapped[float] = mapped_column(Float)
    max_cost_usd: Mapped[float] = mapped_column(Float)
    secrets: Mapped[list[str]] = mapped_column(JSON)
    """The names of the secrets that its trainer gets."""
    retries: Mapped[int] = mapped_column(Integer)
    """New attempts that the loop may begin after failures, for each submit or resume."""
    retries_left: Mapped[int] = mapped_column(Integer)
    want: Mapped[str] = mapped_column(String(10))
    """run, stop or cancel. Only the owner changes it, never the loop."""
    wanted_at: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(10))
    why: Mapped[str] = mapped_column(Text)
    wait_until: Mapped[int] = mapped_column(BigInteger)
    attempt_n: Mapped[int] = mapped_column(Integer)
    """The number of its newest attempt; 0: none yet."""
    event_n: Mapped[int] = mapped_column(Integer)
    rev: Mapped[int] = mapped_column(Integer)
    """Counts the writes of this row: a writer that has read another number writes nothing."""
    ended_at: Mapped[int] = mapped_column(BigInteger)
    serves: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """The run and step whose weights it serves, if it is the replica of a revision; NULL: it trains."""


class Deployment(Base):
    """A name that models answer to."""

    __tablename__ = "deployments"
    __table_args__ = (UniqueConstraint("org", "name", name="one_deployment_a_name"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    project: Mapped[str] = mapped_column(_ID)
    name: Mapped[str] = mapped_column(_NAME)
    at: Mapped[int] = mapped_column(BigInteger)
    before: Mapped[dict[str, int]] = mapped_column(JSON)
    """The weights by revision before the last promote, for a rollback."""
    online: Mapped[str] = mapped_column(_NAME, default="")
    """The online server that answers for the name, which then has no revisions; empty: none."""


class Revision(Base):
    """One checkpoint behind a name, and its share of the requests."""

    __tablename__ = "revisions"
    deployment: Mapped[str] = mapped_column(_ID, ForeignKey("deployments.id"), primary_key=True)
    n: Mapped[int] = mapped_column(Integer, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    run: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"))
    step: Mapped[int] = mapped_column(Integer)
    replica: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"))
    """The run that serves it."""
    weight: Mapped[int] = mapped_column(Integer)
    canary: Mapped[float] = mapped_column(Float, default=0.0)
    """Its share of all requests while it is tried; 0: it is no canary."""
    keep_s: Mapped[int] = mapped_column(Integer, default=0)
    """How long a replica is kept that no request reaches; 0: for ever."""
    why: Mapped[str] = mapped_column(Text, default="")
    """Why it is no canary any more, if it was rolled back by itself."""
    counts: Mapped[dict[str, float]] = mapped_column(JSON, default=dict)
    """Of its answers (counts.py)."""
    beside: Mapped[dict[str, float]] = mapped_column(JSON, default=dict)
    """Of the answers of the revisions with a weight, since it began as a canary."""


class Rating(Base):
    """What a user thought of an answer. A later value of the same answer replaces it."""

    __tablename__ = "ratings"
    deployment: Mapped[str] = mapped_column(_ID, ForeignKey("deployments.id"), primary_key=True)
    answer: Mapped[str] = mapped_column(String(200), primary_key=True)
    """The answer's id, and the number of the choice."""
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    n: Mapped[int] = mapped_column(Integer)
    """Of the revision that gave it."""
    value: Mapped[float] = mapped_column(Float)


class Package(Base):
    """The name of a package of environments. It belongs to its first org for good, also if all versions are yanked."""

    __tablename__ = "packages"
    id: Mapped[str] = mapped_column(_NAME, primary_key=True)
    """The distribution's name, normalised."""
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    project: Mapped[str] = mapped_column(_ID)
    """The only project that sees it; empty: every project of its org."""
    title: Mapped[str] = mapped_column(String(130))
    skeleton: Mapped[str] = mapped_column(_NAME, unique=True)
    """What names that look alike have in common."""
    at: Mapped[int] = mapped_column(BigInteger)


class PackageVersion(Base):
    """One wheel. Nothing of it changes but whether it is yanked; its bytes are in the file of its SHA-256."""

    __tablename__ = "package_versions"
    package: Mapped[str] = mapped_column(_NAME, ForeignKey("packages.id"), primary_key=True)
    version: Mapped[str] = mapped_column(String(60), primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    file: Mapped[str] = mapped_column(String(200))
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(Integer)
    metadata_text: Mapped[bytes] = mapped_column(LargeBinary)
    told: Mapped[dict[str, Any]] = mapped_column(JSON)
    """Of its METADATA and entry points: requires_python, requires, summary, environments."""
    provenance: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The signed envelope."""
    pushed_by: Mapped[str] = mapped_column(_ID)
    yanked_at: Mapped[int] = mapped_column(BigInteger)
    yanked_why: Mapped[str] = mapped_column(String(300))


class Attempt(Base):
    """One execution of a run. It is claimed here before it trains, and closed here before another begins."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run", "n", name="one_attempt_a_number"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    run: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    n: Mapped[int] = mapped_column(Integer)
    name: Mapped[str] = mapped_column(_NAME, unique=True)
    """The name of its job at the provider, written before the provider is asked."""
    target: Mapped[str] = mapped_column(_NAME)
    usd_per_hour: Mapped[float] = mapped_column(Float)
    handle: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    state: Mapped[str] = mapped_column(String(10))
    """open, claimed or closed."""
    claimed_by: Mapped[str] = mapped_column(_NAME)
    claimed_at: Mapped[int] = mapped_column(BigInteger)
    lease_until: Mapped[int] = mapped_column(BigInteger)
    ticks: Mapped[int] = mapped_column(BigInteger)
    """The progress counter that its agent told last."""
    moved_at: Mapped[int] = mapped_column(BigInteger)
    """When the counter changed last, by this machine's clock."""
    limit_ms: Mapped[int] = mapped_column(BigInteger)
    """The longest time in the run's stage without a tick."""
    end: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """How the claimed execution says that it ended; it says so once."""
    ended_at: Mapped[int] = mapped_column(BigInteger)
    closed_at: Mapped[int] = mapped_column(BigInteger)
    closed_why: Mapped[str] = mapped_column(Text)


class Event(Base):
    """What happened to a run, numbered from 1."""

    __tablename__ = "events"
    run: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"), primary_key=True)
    n: Mapped[int] = mapped_column(Integer, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    at: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(40))
    body: Mapped[dict[str, Any]] = mapped_column(JSON)


class Usage(Base):
    """What was used. The key is made of what is counted, so that counting it again adds nothing."""

    __tablename__ = "usage"
    key: Mapped[str] = mapped_column(_NAME, primary_key=True)
    org: Mapped[str] = mapped_column(_ID, ForeignKey("orgs.id"))
    run: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(40))
    began: Mapped[int] = mapped_column(BigInteger)
    ended: Mapped[int] = mapped_column(BigInteger)
    usd: Mapped[float] = mapped_column(Float)


class Stream(Base):
    """The generation of one mirrored file. How long it is, the file itself says."""

    __tablename__ = "streams"
    run: Mapped[str] = mapped_column(_ID, ForeignKey("runs.id"), primary_key=True)
    file: Mapped[str] = mapped_column(String(300), primary_key=True)
    generation: Mapped[int] = mapped_column(BigInteger)
