"""The architecture on one page: the interface of each part. Callers rely on nothing beyond it. What only some
implementations of a part can do is a runtime-checkable protocol of its own; callers ask for it by `isinstance`.

The loop (`tandem.loop`) uses these protocols only; `tandem.build` alone picks the concrete classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tandem.types import (
    Alternatives,
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
    TokenSums,
    ToolCall,
    Totals,
    WeightKind,
    Weights,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from tandem.job_types import Handle, Job, Need, Offer, Sight


class Reply(Protocol):
    """The assistant's turn as an environment sees it."""

    @property
    def text(self) -> str: ...                            # the answer, without thinking and stop string
    @property
    def truncated(self) -> bool: ...                      # whether the turn reached max_tokens
    @property
    def tool_calls(self) -> Sequence[ToolCall]: ...       # removed from `text`; empty unless tools were offered


class Chat(Protocol):
    """One conversation with the policy, recorded token by token."""

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None: ...   # offers tools (JSON schemas), before any reply
    def say(self, *messages: Message | str) -> None: ...  # appends messages: a str is the user's, role "tool" a tool's
    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply: ...   # samples a turn
    async def judge(self, messages: Sequence[Message], *, max_tokens: int = 512) -> str: ...   # asks the judge model


@runtime_checkable
class TimedChat(Protocol):
    """A chat whose episode has a deadline."""

    def off_the_clock(self) -> AbstractContextManager[None]: ...   # suspends the deadline while other work is awaited


class Environment(Protocol):
    """Tasks, and how one is played and scored."""

    def tasks(self, split: str) -> Sequence[Task]: ...    # the tasks of "train" or "eval"
    async def run(self, task: Task, chat: Chat) -> Outcome: ...   # plays one episode and scores it


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can warm up a model with SFT."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]: ...   # turns to follow task.messages


@runtime_checkable
class Reporting(Protocol):
    """An environment that says what it found in its data."""

    @property
    def report(self) -> str: ...                          # rows read, used and left out, with the reasons; or empty


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The samples of one optimizer step, token by token, as read-only arrays. T tokens of S samples, one sample behind
    the other, in the order in which the step took them."""

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    """True where the loss counts."""
    logprobs_T: NDArray[np.float32]
    """As the engine reported them; 0 where the policy sampled nothing."""
    versions_T: NDArray[np.int64]
    """The version that sampled each token; -1 if none did."""
    advantages_T: NDArray[np.float32]
    """0 where the loss does not count."""
    sample_T: NDArray[np.int64]
    """The sample that each token belongs to: `rewards_S[sample_T]` is the reward of each token."""
    rewards_S: NDArray[np.float64]
    group_S: NDArray[np.int64]
    """The group that each sample belongs to."""
    task_ids: tuple[str, ...]
    """The task of each sample."""


@dataclass(frozen=True)
class Step:
    """An optimizer step that has ended, as a callback sees it."""

    version: int
    """Steps taken so far, this one included."""
    stage: str
    """warmup, rl, sft or preference."""
    metrics: Mapping[str, float]
    """The row of metrics.jsonl; it cannot be written to."""
    read_tokens: Callable[[], StepTokens] = field(repr=False)
    """Makes `tokens`."""

    @cached_property
    def tokens(self) -> StepTokens:
        """The batch by token; made when it is first read, so a callback that reads no token pays for none."""
        return self.read_tokens()


class Callback(Protocol):
    """Called after every optimizer step. An exception ends the run."""

    def on_step(self, step: Step) -> Mapping[str, float] | None: ...   # what it returns is added to the step's metrics


@runtime_checkable
class StartingCallback(Protocol):
    """A callback that is told where the run's directory is."""

    def on_start(self, directory: Path) -> None: ...      # before the first step; again when the run is resumed


@runtime_checkable
class EndingCallback(Protocol):
    """A callback that is told how the run ended."""

    def on_end(self, status: Mapping[str, Any]) -> None: ...   # the content of status.json


Credit = list[list[float]]                                # of one group: per trajectory, per trained token
OnToken = Callable[[int, float, int], None]               # token id, logprob, version; called on the event loop
OnRanked = Callable[[int, float, int, Alternatives], None]   # the same of a request that asks for `top_logprobs`


class Engine(Protocol):
    """Samples tokens; holds one version of the weights."""

    @property
    def version(self) -> int: ...                         # the version that it serves; below 0: none yet
    @property
    def receivers(self) -> int: ...                       # how many receivers it opens on a bridge
    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *,
        session: str | None = None, on_token: OnToken | None = None,
    ) -> Completion: ...                                  # samples one completion
    async def attach(self, source: WeightSource) -> None: ...   # opens a receiver; again with a new source: reconnects
    async def load(self, version: int) -> Served: ...     # receives `version`; later requests are sampled from it
    async def sleep(self) -> None: ...                    # yields memory shared with the trainer until load() or wake()
    async def wake(self) -> None: ...                     # takes that memory back and serves the same version again
    async def lost(self) -> None: ...                     # returns once the attached engine died or was replaced
    async def close(self) -> None: ...                    # ends it and frees its memory


class DigestedEngine(Engine, Protocol):
    """An engine that can compute digests of its weights at any time."""

    async def fingerprints(self) -> Fingerprints: ...     # computes the digests of the served weights now


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that gives logprobs of tokens that it did not sample."""

    async def score(self, ids: Sequence[int]) -> list[float]: ...   # of ids[1:], at temperature 1


class ImageSource(Protocol):
    """What a model that sees makes of the images of a run, by their digests."""

    @property
    def pad_id(self) -> int: ...                          # the token in an image's place
    def grid(self, digest: str) -> tuple[int, int, int]: ...   # its patches: time, height, width
    def length(self, digest: str) -> int: ...             # its tokens
    def pixels(self, digest: str) -> Tensor: ...          # patches x their values
    def key(self, digest: str) -> str: ...                # of the image and of how its pixels are made


@runtime_checkable
class ShapingEngine(Protocol):
    """An engine that has some of the options of `Sampling.extras`."""

    def why_not(self, sampling: Sampling) -> str: ...     # why it cannot sample so; empty if it can. May take seconds


def why_not_sampled(engine: object, sampling: Sampling) -> str:
    """Return why an engine cannot sample so; empty if it can. The text begins with the option's name."""
    if isinstance(engine, ShapingEngine):
        return engine.why_not(sampling)
    if sampling.images:
        return "images: this engine takes text only"
    return f"{sampling.extras[0]}: this engine does not have it; `tandem serve` does" if sampling.extras else ""


@runtime_checkable
class PooledEngine(Protocol):
    """Several engines that are one Engine."""

    async def generate_each(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> Mapping[str, Completion]: ...                    # samples one completion from each engine; by engine name


async def generate_each(engine: Engine, prompt_ids: Sequence[int], sampling: Sampling) -> Mapping[str, Completion]:
    """Sample one completion from each engine of a pool, by name; from a single engine, under an empty name."""
    if isinstance(engine, PooledEngine):
        return await engine.generate_each(prompt_ids, sampling)
    return {"": await engine.generate(prompt_ids, sampling)}


@runtime_checkable
class StartingEngine(Protocol):
    """An engine whose requests wait while it starts."""

    @property
    def is_coming(self) -> bool: ...                      # whether requests wait for a start, which has a deadline


@runtime_checkable
class FindableEngine(Protocol):
    """An engine that can look for its lost server."""

    async def found(self) -> None: ...                    # returns once the lost server answers again, or cannot


class WeightSource(Protocol):
    """The engine's end of a bridge. An engine in another process builds its own from `link`: plain JSON, no pickle."""

    @property
    def carries(self) -> WeightKind: ...                  # the form in which weights arrive
    @property
    def link(self) -> Mapping[str, Any]: ...              # how to connect; empty: in this process only
    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None: ...   # to use by the engine
    def attached(self, reply: Mapping[str, Any]) -> None: ...        # takes each engine's reply: layout and handles
    def receive(self, version: int, rank: int = 0) -> Weights: ...   # waits for the version; SyncTimeout at a deadline
    def close(self) -> None: ...                          # disconnects


class WeightBridge(Protocol):
    """The trainer's end of a bridge."""

    mode: str                                             # its name in the spec and in proofs
    carries: WeightKind                                   # the form that Trainer.export must return
    def source(self, num_receivers: int = 1) -> WeightSource: ...   # makes a new connection; drops the one before
    def storage(self) -> Mapping[str, Tensor] | None: ... # the memory that the policy must use (single copy)
    def send(self, weights: Weights) -> Sent: ...         # blocks until it is sent; SyncTimeout at a deadline
    def close(self) -> None: ...                          # disconnects


@runtime_checkable
class Stateful(Protocol):
    """A part whose state belongs in a checkpoint."""

    def state(self) -> dict[str, Any]: ...                # a copy of its state: JSON, and groups
    def restore(self, state: Mapping[str, Any]) -> None: ...   # takes it back; called before any other method


class RolloutStore(Stateful, Protocol):
    """Groups waiting to be trained on. A slot is held from `admit` to `release` or `drop`: that bounds staleness."""

    async def admit(self) -> Ticket: ...                  # waits for a slot; then one rollout may start
    async def put(self, ticket: Ticket, group: Group) -> None: ...   # hands in the finished group
    async def drop(self, ticket: Ticket, reason: str) -> None: ...   # gives the slot back without a group
    async def take(self, count: int) -> list[Group]: ...  # oldest started first; Starved after too many drops in a row
    async def release(self, count: int) -> None: ...      # frees slots; only after the engine holds the new version
    async def ack(self, groups: Sequence[Group]) -> None: ...        # forgets groups; only once a checkpoint has them
    def fail(self, error: BaseException) -> None: ...     # raises this error in every waiting and later call


class Producer(Stateful, Protocol):
    """Plays groups and puts them into the store."""

    async def run(self) -> None: ...                      # runs until cancelled, or raises
    def drain_metrics(self) -> Metrics: ...               # of the groups finished since the last call


class Policy(Protocol):
    """The model as the trainer sees it."""

    def logprobs(self, micro: MicroBatch, temperature: float, top_p: float) -> TokenLogprobs: ...   # with a gradient
    def score(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor: ...   # without a gradient
    def reference_logprobs(self, micro: MicroBatch, temperature: float, top_p: float) -> Tensor: ...
    def trainable(self) -> Sequence[tuple[str, Tensor]]: ...   # the parameters that the optimizer updates
    def divergence(self, micro: MicroBatch) -> Tensor: ...   # KL(reference || policy) at each token, with a gradient
    def reference_bytes(self) -> int: ...                 # size of the weights that only the reference uses
    def head_bytes(self, num_tokens: int, top_p: float) -> tuple[int, int]: ...   # size of logits: forward, backward
    def hides_activations(self) -> bool: ...              # whether autograd's hooks cannot count its activations
    def weights(self, version: int, kind: WeightKind) -> Weights: ...   # the weights, in the form that a bridge sends
    def base(self) -> Iterator[tuple[str, Tensor]]: ...   # the frozen weights under the adapters
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...   # moves the weights into this memory, values kept
    def export(self, path: Path) -> None: ...             # writes Hugging Face format
    def deployer(self) -> Callable[[Mapping[str, Tensor], Path], None]: ...   # export of copies, on any thread


class Optimizer(Protocol):
    """Applies gradients to the policy's weights."""

    def update(self, gradients: MutableMapping[str, Tensor], lr: float, scale: float = 1.0) -> None: ...   # empties it
    @property
    def workspace_bytes(self) -> int: ...                 # the most memory that an update needs meanwhile
    def drain_metrics(self) -> Metrics: ...               # of the updates since the last call
    def drain_sums(self) -> Sequence[float]: ...          # the same, as sums that those of other ranks are added to
    def state(self) -> dict[str, Tensor]: ...             # by parameter name; with the bits that 16-bit weights lack
    def cut(self) -> Mapping[str, tuple[int, tuple[int, ...]]]: ...   # first row and whole shape of state cut by itself
    def load(self, state: Mapping[str, Tensor]) -> None: ...   # takes such a state back


class OptimizerRule(Protocol):
    """An optimizer of the user's own; `by_rows = True` says that rows of a matrix may be updated apart."""

    def init(self, like: Tensor) -> dict[str, Tensor]: ...   # the state of one parameter: fp32 tensors of zeros
    def update(
        self, value: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None: ...                                        # changes value and state in place; step is 1 at the first


class Trainer(Protocol):
    """Turns a batch into a new version."""

    version: int                                          # optimizer steps taken: the only clock of the system
    def step(self, batch: Batch) -> Metrics: ...          # one optimizer step
    def finish(self) -> None: ...                         # raises NothingLearned if no step changed a weight
    def export(self, kind: WeightKind) -> Weights: ...    # the weights, in the form that a bridge sends
    def score(self, ids: Sequence[int], first: int) -> list[float]: ...   # logprobs of ids[first:] at temperature 1
    def base(self) -> Iterator[tuple[str, Tensor]]: ...   # the frozen weights under the adapters; never sent
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...   # moves the policy's weights into this memory
    def save(self, path: Path) -> None: ...               # writes weights and optimizer state
    def snapshot(self) -> Callable[[Path], None]: ...     # copies both; call the result on any thread, before the next
    def load(self, path: Path) -> None: ...               # reads what `save` wrote


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Three functions: keep, credit, loss."""

    name: str
    keep: Callable[[Group], bool]                         # the filter: False drops a group that teaches nothing
    credit: Callable[[Sequence[Group]], list[Credit]]     # advantages of all groups of a step, compared with each other
    loss: Callable[[TokenLogprobs, MicroBatch, Totals], tuple[Tensor, TokenSums]]
    needs_reference: bool = False                         # whether the loss uses reference logprobs
    credit_is_all: bool = True                            # whether a sample without credit teaches nothing
    together: bool = False                                # whether siblings must share a micro-batch
    needs_kl: bool = False                                # whether the loss uses an estimate of the KL over the step


class Provider(Protocol):
    """Starts command lines on machines, watches them and ends them. What it knows outlives its process. Methods but
    `look` raise ProviderRefused for what cannot be (ProviderBusy: now), and ProviderSilent where there is no answer."""

    async def offers(self, need: Need) -> list[Offer]: ...   # what there is now, its price, why not; starts nothing
    async def launch(self, job: Job) -> Handle: ...       # starts job.name, once ever; or MaybeLaunched
    async def find(self, prefix: str) -> list[Handle]: ...   # the jobs it knows whose names begin so, ended ones too
    async def look(self, handles: Sequence[Handle]) -> list[Sight]: ...   # one for each, in order; never raises
    async def end(self, handle: Handle, grace_s: float) -> None: ...   # SIGTERM, wait, SIGKILL; again is harmless
    async def read(
        self, handle: Handle, path: str, offset: int, limit: int
    ) -> bytes: ...                                       # of a file in the job's directory; empty: no such byte yet
