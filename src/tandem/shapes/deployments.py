"""Between a user and the control plane: deployments, models behind names."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from tandem.shapes.base import Answer, Asked

DEPLOYMENT_HEADER = "X-Tandem-Deployment"
"""Of a request that the control server passes on to an online server: the name that its client asked for."""
DEPLOYMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$"
DeploymentName = Annotated[str, StringConstraints(pattern=DEPLOYMENT_NAME)]


class DeployBody(Asked):
    """What to put behind a name: a checkpoint, as its next revision, or an online server."""

    name: DeploymentName
    run: str = Field(default="", max_length=40)
    step: int = Field(default=0, ge=0, lt=2**31)
    online: str = Field(default="", max_length=40)
    """An online server that the operator has named, in place of a run. The operator alone may ask for it."""
    weight: int = Field(default=0, ge=0, le=1000)
    """Its share of the requests, beside the weights of the others. The first revision of a name gets 100 in place of
    0."""
    canary: float = Field(default=0.0, ge=0, lt=1)
    """Its share of all requests while it is tried: it has no weight until it is promoted. 0: it is no canary."""
    keep_s: int = Field(default=0, ge=0, lt=2**31)
    """End its replica after so many seconds without a request; the next request starts it again. 0: never."""
    feedback: bool = False
    """Keep each chat on the replica's machine, and take feedback for its answers."""
    engine: Literal["hf", "vllm"] = "hf"
    """What its replica samples with: the embedded engine, or the vLLM that the run's spec names."""
    target: str = Field(default="", max_length=40)
    """Default: the run's own, which holds its weights."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.run) == bool(self.online):
            raise ValueError("write either run and step, or online")
        alone = DeployBody.model_construct(name=self.name, online=self.online)
        if self.online and (more := [name for name, value in self if value != getattr(alone, name)]):
            raise ValueError(f"{more[0]}: is of a checkpoint; an online server has none of it")
        return self


class PromoteBody(Asked):
    """The revision that gets all requests."""

    revision: int = Field(ge=1, lt=2**31)


class Measured(Answer):
    """A mean or a rate of a revision's answers, with its 95 % interval."""

    count: int
    """How many values it is of."""
    mean: float
    low: float
    high: float


class RevisionInfo(Answer):
    """One checkpoint behind a name."""

    n: int
    run: str
    step: int
    weight: int
    state: str
    """Of its replica, as of a run: running once it was claimed, failed if it was refused."""
    why: str
    """Why its replica ended, or why it is no canary any more."""
    ready: bool
    """Whether its replica answers now."""
    at: int
    asleep: bool = False
    """Its replica was ended since no request reached it. The next request starts it again."""
    canary: float = 0.0
    """Its share of all requests while it is tried."""
    keep_s: int = 0
    errors: Measured
    """The share of its answers that failed."""
    seconds: Measured
    """Of its answers, from the request to the last byte."""
    feedback: Measured
    """Of its answers that were rated."""


class DeploymentInfo(Answer):
    """A name and its revisions, the oldest first."""

    id: str
    name: str
    at: int
    revisions: list[RevisionInfo]
    online: str = ""
    """The online server that answers for it, which makes its own versions; the name then has no revisions."""


class DeploymentList(Answer):
    items: list[DeploymentInfo]
