"""Messages from worker processes, all validated, because a worker runs code that is not ours.

A worker sends messages for the policy and asks for its replies, as text. Tokens, logprobs and versions never pass
through a worker, so it cannot forge them; it does decide the reward.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, field_validator

from tandem.io.image_parts import is_portable
from tandem.types import MAX_METRICS

FailureKind = Literal[
    "raised", "hung", "no_outcome", "not_a_number", "template", "context_full", "judge", "out_of_memory"
]
FAILURE_KINDS = frozenset(FailureKind.__args__)
MAX_TEXT = 2_000  # characters of an error


class _WorkerMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SaidMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    role: str = Field(min_length=1, max_length=64)
    content: JsonValue = None

    @field_validator("content")
    @classmethod
    def _reads_no_file(cls, content: JsonValue) -> JsonValue:
        """A worker may be in a sandbox: for no path of its own is a file read outside of it."""
        if not is_portable(content):
            raise ValueError("an image is not a data URI")
        return content

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class AskTools(_WorkerMessage):
    op: Literal["offer"]
    tools: list[dict[str, JsonValue]] = Field(max_length=256)


class AskReply(_WorkerMessage):
    op: Literal["reply"]
    id: int
    said: list[SaidMessage]
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[str] = Field(default=[], max_length=64)


class AskJudge(_WorkerMessage):
    op: Literal["judge"]
    id: int
    messages: list[SaidMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=1_000_000)


class Forget(_WorkerMessage):
    """The worker no longer waits for this answer."""

    op: Literal["forget"]
    id: int


class Done(_WorkerMessage):
    op: Literal["done"]
    said: list[SaidMessage]
    reward: float
    metrics: dict[str, float] = Field(max_length=MAX_METRICS)


class Failed(_WorkerMessage):
    op: Literal["failed"]
    kind: FailureKind
    text: str = Field(max_length=MAX_TEXT)


FromEpisode = AskTools | AskReply | AskJudge | Forget | Done | Failed
FROM_EPISODE: TypeAdapter[FromEpisode] = TypeAdapter(Annotated[FromEpisode, Field(discriminator="op")])


class ToldExpected(_WorkerMessage):
    columns: dict[str, str]
    read: list[str]


class ToldTask(_WorkerMessage):
    id: str
    messages: list[SaidMessage] = Field(min_length=1)
    expected: ToldExpected


class Tasks(_WorkerMessage):
    op: Literal["tasks"]
    tasks: list[ToldTask]
    more: bool


class Demonstrated(_WorkerMessage):
    op: Literal["demonstrated"]
    messages: list[SaidMessage]
    state: list[JsonValue]
    """State of the generator after the demonstration."""


class RefusedMessage(_WorkerMessage):
    op: Literal["refused"]
    kind: Literal["spec", "environment", "sandbox"]
    text: str = Field(max_length=MAX_TEXT)


class LoadedMessage(_WorkerMessage):
    op: Literal["loaded"]
    demonstrates: bool
    threads: int
    replies_first: bool = False
    """Whether each episode begins with a reply, which can be sampled before a worker is free."""
    report: str = Field(default="", max_length=MAX_TEXT)
    """What loading found in the environment's data; empty if it says nothing."""


FromLoader = Tasks | Demonstrated | RefusedMessage | LoadedMessage
FROM_LOADER: TypeAdapter[FromLoader] = TypeAdapter(Annotated[FromLoader, Field(discriminator="op")])


class WorkerEnded(_WorkerMessage):
    """From the fork server: how a worker ended."""

    op: Literal["ended"]
    worker: int
    how: str = Field(max_length=16_000)


ENDED: TypeAdapter[WorkerEnded] = TypeAdapter(WorkerEnded)
