"""The architecture on one page: what each part may expect of the others, and nothing else.

The loop (`tandem.loop`) talks to these; `tandem.build.training` alone knows which class stands behind which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.types import (
    Batch,
    Completion,
    Fingerprints,
    Group,
    Message,
    Metrics,
    MicroBatch,
    Outcome,
    Sampling,
    Sent,
    Served,
    Task,
    Ticket,
    TokenLogprobs,
    ToolCall,
    Totals,
    WeightKind,
    Weights,
)

if TYPE_CHECKING:
    from torch import Tensor


class Reply(Protocol):
    """The assistant's turn as an environment sees it."""

    @property
    def text(self) -> str: ...                            # without thinking, without the stop string
    @property
    def truncated(self) -> bool: ...                      # ran into max_tokens
    @property
    def tool_calls(self) -> Sequence[ToolCall]: ...       # not in text; empty unless tools were offered


class Chat(Protocol):
    """One conversation with the policy, recorded token by token."""

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None: ...   # JSON schemas, before the first reply
    def say(self, *messages: Message | str) -> None: ...  # a str is a user message; a tool's answer has role "tool"
    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply: ...
    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str: ...   # another model's answer


class Environment(Protocol):
    """Tasks, and how one is played and scored. One line more: `demonstrate(task, rng) -> list[Message]`, what follows
    `task.messages`, lets SFT warm up on it."""

    def tasks(self, split: str) -> Sequence[Task]: ...
    async def run(self, task: Task, chat: Chat) -> Outcome: ...


Credit = list[list[float]]                                # of a group: per trajectory, per trained token
OnToken = Callable[[int, float, int], None]               # id, logprob, version; on the event loop, as each is made


class Engine(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def receivers(self) -> int: ...                       # how many ends of a bridge it opens
    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *,
        session: str | None = None, on_token: OnToken | None = None,
    ) -> Completion: ...
    async def attach(self, source: WeightSource) -> None: ...   # again, with a new source: takes a lost partner back
    async def load(self, version: int) -> Served: ...     # every request admitted afterwards is sampled from `version`
    async def sleep(self) -> None: ...                    # lends what it shares with the trainer, till load() or wake()
    async def wake(self) -> None: ...
    async def lost(self) -> None: ...                     # returns once it is gone, or is another than was attached
    async def close(self) -> None: ...


class DigestedEngine(Engine, Protocol):
    async def fingerprints(self) -> Fingerprints: ...     # of what is served, computed now


class WeightSource(Protocol):
    """The engine's end of a bridge. Another process makes its own from `link`: plain JSON, no pickle."""

    @property
    def carries(self) -> WeightKind: ...
    @property
    def link(self) -> Mapping[str, Any]: ...              # empty: it works in this process only
    def house(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None: ...   # for the engine's to live in
    def attached(self, reply: Mapping[str, Any]) -> None: ...        # what each engine said: its layout, its handles
    def receive(self, version: int, rank: int = 0) -> Weights: ...   # waits for it; SyncTimeout after a deadline
    def close(self) -> None: ...


class WeightBridge(Protocol):
    """The trainer's end."""

    mode: str
    carries: WeightKind                                   # what Trainer.export is asked for
    def source(self, num_receivers: int = 1) -> WeightSource: ...   # a new meeting; whatever was before is given up
    def storage(self) -> Mapping[str, Tensor] | None: ...           # what the policy must live in (single copy)
    def send(self, weights: Weights) -> Sent: ...         # blocks; SyncTimeout after a deadline
    def close(self) -> None: ...


class Stateful(Protocol):
    """What has something to remember when a run goes on in another process."""

    def state(self) -> dict[str, Any]: ...                # JSON, and groups; as of now, whatever happens afterwards
    def restore(self, state: Mapping[str, Any]) -> None: ...   # before anything else is asked


class RolloutStore(Stateful, Protocol):
    """Groups waiting to be trained on. A slot is held from `admit` to `release` or `drop`: that bounds staleness."""

    async def admit(self) -> Ticket: ...                  # waits for a slot: a rollout may start
    async def put(self, ticket: Ticket, group: Group) -> None: ...
    async def drop(self, ticket: Ticket, reason: str) -> None: ...   # nothing to learn; the slot is free at once
    async def take(self, count: int) -> list[Group]: ...  # oldest started first; Starved after too many drops in a row
    async def release(self, count: int) -> None: ...      # the slots: only after the engine holds the new version
    async def ack(self, groups: Sequence[Group]) -> None: ...        # only after a checkpoint that contains them
    def fail(self, error: BaseException) -> None: ...     # every waiter, now or later, gets this error


class Producer(Stateful, Protocol):                               # fills the store
    async def run(self) -> None: ...                      # ends only by an error or by being cancelled
    def drain_metrics(self) -> Metrics: ...               # of what finished since the last call


class Policy(Protocol):
    """The model as the trainer sees it."""

    def logprobs(self, micro: MicroBatch, temperature: float, top_p: float) -> TokenLogprobs: ...
    def score(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor: ...   # without a gradient
    def reference_logprobs(self, micro: MicroBatch, temperature: float, top_p: float) -> Tensor: ...
    def trainable(self) -> Sequence[tuple[str, Tensor]]: ...
    def divergence(self, micro: MicroBatch) -> Tensor: ...   # KL(reference || policy) at each token, with a gradient
    def reference_bytes(self) -> int: ...                 # of weights that are there for the reference alone
    def head_bytes(self, num_tokens: int, top_p: float) -> tuple[int, int]: ...   # of logits, in forward and backward
    def hides_activations(self) -> bool: ...              # from autograd's hooks, that could count them
    def weights(self, version: int, kind: WeightKind) -> Weights: ...
    def base(self) -> Iterator[tuple[str, Tensor]]: ...
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...   # the weights move there, and keep their values
    def export(self, path: Path) -> None: ...             # Hugging Face format
    def deployer(self) -> Callable[[Mapping[str, Tensor], Path], None]: ...   # the same, of copies, on any thread


class Optimizer(Protocol):
    def update(self, gradients: MutableMapping[str, Tensor], lr: float, scale: float = 1.0) -> None: ...   # takes them
    @property
    def workspace_bytes(self) -> int: ...                 # at most held while an update is applied
    def drain_metrics(self) -> Metrics: ...               # what became of the updates since the last call
    def state(self) -> dict[str, Tensor]: ...             # by parameter name; with the bits that 16-bit weights lack
    def load(self, state: Mapping[str, Tensor]) -> None: ...


class Trainer(Protocol):
    version: int                                          # optimizer steps taken: the only clock of the system
    def step(self, batch: Batch) -> Metrics: ...
    def finish(self) -> None: ...                         # NothingLearned if no step moved a weight
    def export(self, kind: WeightKind) -> Weights: ...
    def score(self, ids: Sequence[int], first: int) -> list[float]: ...   # logprobs of ids[first:], untempered
    def base(self) -> Iterator[tuple[str, Tensor]]: ...   # what adapters stand upon, and is never sent
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...         # of the policy
    def save(self, path: Path) -> None: ...
    def snapshot(self) -> Callable[[Path], None]: ...     # a copy, to be written on any thread, before the next one
    def load(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Three functions."""

    name: str
    keep: Callable[[Group], bool]                         # False: there is nothing to learn from it
    credit: Callable[[Sequence[Group]], list[Credit]]     # of a step's groups: some algorithms compare across them
    loss: Callable[[TokenLogprobs, MicroBatch, Totals], tuple[Tensor, Metrics]]
    needs_reference: bool = False
    credit_is_all: bool = True                            # no credit, nothing to learn
    together: bool = False                                # the loss compares siblings: they share a micro-batch
