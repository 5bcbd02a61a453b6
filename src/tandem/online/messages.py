"""The messages between the server process and the trainer process: JSON in frames, each of a known shape.

Both processes send requests. A request has a number and gets one reply with that number: a value, or an error with its
class. JobProgress is a notification and gets no reply. Neither process trusts the other's bytes: unknown fields are
refused, and a connection that carries anything else is closed.

A job, from its start to its publication:

    server > Train > trainer                  trains and measures the gates; writes the version; JobProgress meanwhile
    server commits the version in jobs/       from here on it survives any kill
    server > Publish > trainer                the trainer's Publisher sends weights and asks in turn:
        trainer > Attach > server             open a receiver
        trainer > Load > server               receive this version
        trainer > CanarySample > server       answer the canary prompt
    server > Settle > trainer                 keep the version, or undo the job
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from tandem.types import NO_VERSION, Group, Trajectory

Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Sequence1(_Message, frozen=True):
    """The fields of a trajectory that the trainer needs."""

    ids: list[Id]
    first: Whole
    """Index of the first trained token."""
    trained: str
    """"0" or "1" for each token, from `first` on."""
    reward: float = 0.0
    logprobs: list[float] = []
    """Of all tokens if they were sampled; empty for a recording."""
    versions: list[int] = []


class Teaching(_Message, frozen=True):
    """How to train one job."""

    algorithm: str
    lr: float
    steps: int
    context_grad: str
    seed: int
    kl_coef: float = 0.0
    known: float = 0.0
    """The job ends early once every trained token of its samples has at least this probability; 0 turns this off."""


class RpcFailure(_Message, frozen=True):
    kind: str
    """The name of a class in errors.py."""
    text: str


# --- requests of the server process


class Open(_Message, frozen=True, tag=True):
    """Load the model and the active version."""

    spec: dict[str, Any]
    versions: str
    """The directory of updates and anchors."""
    active: Whole
    known: list[Whole]
    """The committed versions; all others in the directory are leftovers."""


class Train(_Message, frozen=True, tag=True):
    """Train one job, measure its gates, and write its version."""

    job: str
    version: Whole
    parent: Whole
    groups: list[list[Sequence1]]
    replay: list[list[Sequence1]]
    replay_rounds: Whole
    """Step s trains on every `replay_rounds`-th replayed group, beginning with number s."""
    held: list[list[Sequence1]]
    """Ordinary prompts with the model's own answers. Each step penalises changes on some of them."""
    drawn: list[tuple[list[Id], list[Id]]]
    """Other ordinary prompts, with answers that the parent version sampled, for the KL gate."""
    teaching: Teaching


class Publish(_Message, frozen=True, tag=True):
    """Publish the version that the trainer holds; reply with the proof."""

    version: Whole


class Settle(_Message, frozen=True, tag=True):
    """Keep the last trained version, or undo its job."""

    version: Whole
    keep: bool


class Activate(_Message, frozen=True, tag=True):
    """Load an earlier version; the next job trains on from it."""

    version: Whole


class Checkpoint(_Message, frozen=True, tag=True):
    """Write an anchor of the active version."""

    keep: list[Whole]
    """Versions that must stay on the disk."""


class Cancel(_Message, frozen=True, tag=True):
    """End this job before its next step."""

    job: str


# --- requests of the trainer process


class Attach(_Message, frozen=True, tag=True):
    """Open a receiver for this link, and attach it to the engine."""

    link: dict[str, Any]


class Load(_Message, frozen=True, tag=True):
    """Make the engine receive and serve this version."""

    version: Whole


class CanarySample(_Message, frozen=True, tag=True):
    """Sample the canary's answer from the engine."""

    prompt_ids: list[Id]
    max_tokens: Whole


class JobProgress(_Message, frozen=True, tag=True):
    """A step has ended. Gets no reply."""

    job: str
    step: Whole
    steps: Whole
    metrics: dict[str, float]


RpcCall: TypeAlias = (
    Open | Train | Publish | Settle | Activate | Checkpoint | Cancel | Attach | Load | CanarySample | JobProgress
)


class RpcRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="q"):
    number: Whole
    what: RpcCall


class RpcReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="a"):
    number: Whole
    value: dict[str, Any] = {}
    failure: RpcFailure | None = None


_DECODER = msgspec.json.Decoder(RpcRequest | RpcReply)


def encode(message: RpcRequest | RpcReply) -> bytes:
    """Return the message as JSON. msgspec, since it must be fast: a job may have a million tokens, and the event loop
    that encodes it also serves requests."""
    return msgspec.json.encode(message)


def decode(frame: bytes) -> RpcRequest | RpcReply:
    """Return the message in this frame. msgspec.ValidationError says what is wrong with it."""
    return _DECODER.decode(frame)


# --- replies


class GateReport(_Message, frozen=True):
    """The outcome of one gate."""

    gate: str
    passed: bool
    value: float | None
    limit: float | None
    text: str
    numbers: dict[str, float] = {}


class Trained(_Message, frozen=True):
    """`outcome`: passed, rejected, cancelled or failed. Only `passed` makes a version."""

    outcome: str
    why: str = ""
    gates: list[GateReport] = []
    metrics: dict[str, float] = {}
    bytes: Whole = 0
    seconds: float = 0.0
    digest: str = ""
    changed: Whole = 0


class WorkerOpened(_Message, frozen=True):
    version: Whole
    digest: str
    """Of the weights that were read from the disk."""
    exact: bool
    """Whether master weights and optimizer state are of this version, too."""
    parameters: Whole = 0
    pid: Whole = 0
    damaged: list[str] = []
    trained: dict[str, Any] = {}
    """Which weights are trained: requested, engaged, why not."""


class UpdateWritten(_Message, frozen=True):
    version: Whole
    bytes: Whole
    seconds: float
    already: bool = False


# --- trajectories


def to_wire(trajectory: Trajectory) -> Sequence1:
    first = trajectory.trained.index(True)
    sampled = any(version != NO_VERSION for version in trajectory.versions)
    return Sequence1(
        trajectory.ids,
        first,
        "".join("01"[trained] for trained in trajectory.trained[first:]),
        trajectory.reward,
        trajectory.logprobs if sampled else [],
        trajectory.versions if sampled else [],
    )


def from_wire(message: Sequence1, name: str) -> Trajectory:
    count = len(message.ids)
    trained = [False] * message.first + [flag == "1" for flag in message.trained]
    logprobs, versions = message.logprobs or [0.0] * count, message.versions or [NO_VERSION] * count
    if not len(trained) == len(logprobs) == len(versions) == count:
        raise msgspec.ValidationError(
            f"a sequence of {count} tokens has {len(trained)} training flags, {len(logprobs)} logprobs and "
            f"{len(versions)} versions: the counts must be equal"
        )
    status = "finished" if message.versions else "recorded"
    return Trajectory(message.ids, trained, logprobs, versions, message.reward, status, task_id=name)


def groups_from_wire(groups: Sequence[Sequence[Sequence1]], name: str) -> list[Group]:
    return [[from_wire(each, f"{name}:{index}") for each in group] for index, group in enumerate(groups)]
