"""What the two halves of an online server say to each other: JSON in frames, every message of a known shape.

Both ends may ask. A question has a number and gets one answer with that number, or an error of a class that crosses
the wire; `progress` is told and not answered. Neither end believes the other's bytes: unknown fields are refused, and
an end that breaks the rules is cut off.
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
    """One trajectory: what the trainer needs of it."""

    ids: list[Id]
    first: Whole
    """Where the first trained token stands."""
    trained: str
    """0 or 1 a token, from `first` on."""
    reward: float = 0.0
    logprobs: list[float] = []
    """Of all tokens, if they were sampled; none of a recording."""
    versions: list[int] = []


class Teaching(_Message, frozen=True):
    """How one job is to be trained."""

    algorithm: str
    lr: float
    steps: int
    context_grad: str
    seed: int
    kl_coef: float = 0.0
    known: float = 0.0
    """The job ends early, once every trained token of its samples has at least this probability; 0: it does not."""


class RpcFailure(_Message, frozen=True):
    kind: str
    """A class of errors.py."""
    text: str


# --- the server asks the trainer


class Open(_Message, frozen=True, tag=True):
    spec: dict[str, Any]
    versions: str
    """Where updates and anchors lie."""
    active: Whole
    known: list[Whole]
    """Versions that were committed; whatever else lies there never was."""


class Train(_Message, frozen=True, tag=True):
    job: str
    version: Whole
    parent: Whole
    groups: list[list[Sequence1]]
    replay: list[list[Sequence1]]
    replay_rounds: Whole
    """Step s trains on every `replay_rounds`-th of them, from s on."""
    held: list[list[Sequence1]]
    """Ordinary prompts with the model's own answers: each step holds some of them."""
    drawn: list[tuple[list[Id], list[Id]]]
    """Other ordinary prompts, and what the version before said to them: the KL gate compares these."""
    teaching: Teaching


class Publish(_Message, frozen=True, tag=True):
    version: Whole


class Settle(_Message, frozen=True, tag=True):
    """The last trained version is kept, or everything is as before it."""

    version: Whole
    keep: bool


class Activate(_Message, frozen=True, tag=True):
    version: Whole


class Checkpoint(_Message, frozen=True, tag=True):
    keep: list[Whole]
    """Versions that must stay on the disk."""


class Cancel(_Message, frozen=True, tag=True):
    job: str


# --- the trainer asks the server


class Attach(_Message, frozen=True, tag=True):
    link: dict[str, Any]


class Load(_Message, frozen=True, tag=True):
    version: Whole


class CanarySample(_Message, frozen=True, tag=True):
    """The canary of a publication."""

    prompt_ids: list[Id]
    max_tokens: Whole


class JobProgress(_Message, frozen=True, tag=True):
    job: str
    step: Whole
    steps: Whole
    metrics: dict[str, float]


Asked: TypeAlias = (
    Open | Train | Publish | Settle | Activate | Checkpoint | Cancel | Attach | Load | CanarySample | JobProgress
)


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="q"):
    number: Whole
    what: Asked


class RpcReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="a"):
    number: Whole
    value: dict[str, Any] = {}
    failure: RpcFailure | None = None


_DECODER = msgspec.json.Decoder(Question | RpcReply)


def encode(message: Question | RpcReply) -> bytes:
    """Quickly, for a job may be of a million tokens, and who writes it answers others, too."""
    return msgspec.json.encode(message)


def decode(frame: bytes) -> Question | RpcReply:
    """msgspec.ValidationError names what is wrong."""
    return _DECODER.decode(frame)


# --- answers


class GateReport(_Message, frozen=True):
    """One gate's verdict."""

    gate: str
    passed: bool
    value: float | None
    limit: float | None
    text: str
    numbers: dict[str, float] = {}


class Trained(_Message, frozen=True):
    """`outcome`: passed, rejected, cancelled or failed; only after `passed` is there a version."""

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
    """Of what was read from the disk."""
    exact: bool
    """Master and optimizer, too, are as they were after this version."""
    parameters: Whole = 0
    pid: Whole = 0
    damaged: list[str] = []
    trained: dict[str, Any] = {}
    """Which weights: requested, engaged, why not."""


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


def groups_to_wire(groups: Sequence[Group]) -> list[list[Sequence1]]:
    return [[to_wire(each) for each in group] for group in groups]


def from_wire(told: Sequence1, name: str) -> Trajectory:
    count = len(told.ids)
    trained = [False] * told.first + [mark == "1" for mark in told.trained]
    logprobs, versions = told.logprobs or [0.0] * count, told.versions or [NO_VERSION] * count
    if not len(trained) == len(logprobs) == len(versions) == count:
        raise msgspec.ValidationError(f"a sequence of {count} tokens says {len(trained)} times whether it is trained")
    status = "finished" if told.versions else "recorded"
    return Trajectory(told.ids, trained, logprobs, versions, told.reward, status, task_id=name)


def groups_from_wire(groups: Sequence[Sequence[Sequence1]], name: str) -> list[Group]:
    return [[from_wire(each, f"{name}:{index}") for each in group] for index, group in enumerate(groups)]
