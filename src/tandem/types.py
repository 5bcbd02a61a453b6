"""The data on the move. Plain dataclasses; nothing here imports torch, tensors are only named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Message: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content`, and what else a template reads (`tool_calls`, `name`)."""

Metrics: TypeAlias = dict[str, float]
"""Numbers with slash names."""

MEASURED = ("time/", "memory/")
"""What keys begin with that are measurements of a machine: the only ones that may differ between two equal runs."""

NO_VERSION = -1
"""The version of a token that no policy sampled: prompts, template glue, recorded data."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: its opening messages and whatever its environment needs to score it."""

    id: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment returns after an episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; the logprobs are then those of the untempered model."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Added to the tokenizer's own end-of-turn ids."""
    seed: int = 0
    """Equal seeds give equal tokens, whatever else is in the batch."""


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive tokens made by one version of the weights."""

    version: int
    count: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, the one that ended it included; logprobs are under the distribution they were drawn from."""

    ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: FinishReason

    @property
    def versions(self) -> list[int]:
        return [span.version for span in self.spans for _ in range(span.count)]


@dataclass(frozen=True, slots=True)
class Thought:
    """What a turn of the assistant says to itself before it answers."""

    num_tokens: int
    """The mark that closes it included."""
    closed: bool


TrajectoryStatus: TypeAlias = Literal["finished", "truncated", "recorded"]


@dataclass(slots=True)
class Trajectory:
    """What happened, in token space. All per-token lists have the length of `ids`."""

    ids: list[int]
    trained: list[bool]
    """True where the loss counts: tokens that the policy sampled, or that a recording shows as the assistant's."""
    logprobs: list[float]
    """Of the sampled tokens, as the engine reported them; 0.0 elsewhere."""
    versions: list[int]
    reward: float = 0.0
    status: TrajectoryStatus = "finished"
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    shaping: float = 0.0
    """Added to the reward where trajectories with different rewards are compared; no difference by itself."""
    thinking_tokens: int = 0
    """Of the sampled ones: in thoughts, all turns together."""
    unclosed: bool = False
    """Some turn ended within its thought, so it was no answer."""
    task_id: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    """The same conversation as text, for people to read; never tokenised again."""

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


Group: TypeAlias = list[Trajectory]
"""Siblings: trajectories of one task, compared with each other."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to play one group. `order` counts starts, over the whole run, and fixes the hand-out order."""

    order: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What a loss divides by: counts over the whole optimizer step, not over one micro-batch."""

    tokens: int
    sequences: int


@dataclass(slots=True)
class MicroBatch:
    """Rows of packed sequences. B rows, T positions a row, N trained tokens (row-major order)."""

    ids_BT: Tensor
    positions_BT: Tensor
    """Restart at 0 with each sequence."""
    segments_BT: Tensor
    """Which sequence of its row a position belongs to; -1 is padding."""
    parents_BT: Tensor
    """The segment that a position also sees: the prompt that its sequence shares with siblings, or its own segment."""
    source_N: Tensor
    """Flat index into B*T of the position that predicts each trained token."""
    target_N: Tensor
    """Flat index into B*T of each trained token."""
    credit_N: Tensor
    behaviour_N: Tensor
    """Logprobs as the engine reported them."""
    versions_N: Tensor
    length_N: Tensor
    """Trained tokens of the sequence that each trained token belongs to."""
    sequence_N: Tensor
    """Which of the micro-batch's S sequences each trained token belongs to; a sequence is never split."""
    group_S: Tensor
    """Which of the step's groups each sequence belongs to."""
    reference_N: Tensor | None = None
    """Logprobs of the reference policy (or of the teacher), where the algorithm asks for them."""


@dataclass(slots=True)
class Batch:
    """The packed samples of one optimizer step."""

    micro: list[MicroBatch]
    totals: Totals
    metrics: Metrics = field(default_factory=dict[str, float])
    task_ids: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class TokenLogprobs:
    """The policy's view of a micro-batch's N trained tokens."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Detached: a metric, not a term of the loss."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version on the move. `tensors()` yields checkpoint names, one at a time, and can be asked again."""

    version: int
    kind: Literal["full", "adapter"]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Proof:
    """Why we believe that the engine now serves `version`."""

    version: int
    mode: str
    verified: Literal["identity", "none"]
    """identity: every served tensor is the trainer's own memory. none: there is nothing that serves."""
    tensors: int
    bytes_moved: int
    seconds: float
    engines: Sequence[str] = ()
    """Boot ids of the engines that answered."""
