"""The trainer process: a candidate of its own, which becomes a version only after every gate.

consumes: jobs, one at a time                  waits for: the server process
produces: versions on the disk, and published  or everything as it was before the job

It knows no HTTP and no jobs table. What it has trained is an orphan until the server process commits it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandem.errors import NonFinite, TandemError
from tandem.online import gates
from tandem.online.gates import GateOutcome
from tandem.online.messages import (
    Activate,
    Asked,
    Cancel,
    Checkpoint,
    GateReport,
    JobProgress,
    Open,
    Publish,
    Settle,
    Teaching,
    Train,
    Trained,
    UpdateWritten,
    WorkerOpened,
    groups_from_wire,
)
from tandem.online.self_distillation import JudgedAnswers
from tandem.online.version_store import VersionStore
from tandem.online.weight_deltas import HeldVersion, size_of_change
from tandem.ops.module_tensors import Copies
from tandem.protocols import Algorithm, Optimizer, Policy, Trainer
from tandem.publish import Publisher
from tandem.spec.online import OnlineSpec
from tandem.types import Batch, Group, Metrics, Proof, Trajectory, WeightKind, Weights

_log = logging.getLogger(__name__)

_GIB = 2**30


class Cancelled(TandemError):
    """The job was called off between two steps."""


@dataclass(frozen=True)
class CanaryPrompt:
    """A prompt that the model must go on answering as it does."""

    name: str
    prompt_ids: list[int]
    expected_ids: list[int]
    exact: bool


@dataclass(frozen=True)
class TrainerParts:
    """What the trainer process is made of; recipes/online_trainer_process.py knows which classes."""

    policy: Policy
    optimizer: Optimizer
    trainer: Callable[[Algorithm, Teaching, int], Trainer]
    """Of an algorithm, for one job, at a version."""
    algorithm: Callable[[Teaching, JudgedAnswers | None], Algorithm]
    """With whatever judges each token, where the algorithm needs it."""
    make_batch: Callable[[list[Group], Algorithm, int], Batch]
    score: Callable[[Sequence[int], int], list[float]]
    """Logprobs of ids[first:]."""
    losses: Callable[[Trajectory], list[float]]
    """Logprobs of its trained tokens."""
    greedy: Callable[[Sequence[int], int], list[int]]
    """What the model says after a prompt, greedily."""
    publisher: Publisher
    reference: Callable[[bool], None]
    """True: from now on the weights of this moment are what held tokens are compared with; False: none are kept."""
    trained: Mapping[str, Any]
    """Which weights: requested, engaged, why not."""
    frozen_norm: float
    """Of the weights that are not trained."""
    base: Callable[[], dict[str, Any]]
    """Whether the base of adapters is the engine's memory, and why not; empty where there are none."""
    held_out: Sequence[Trajectory] = ()
    canaries: Sequence[CanaryPrompt] = ()


class JobTrainerView:
    """What publishing needs of a trainer; its version is that of the server, and counts jobs."""

    def __init__(self, parts: TrainerParts) -> None:
        self._parts, self.version = parts, 0

    def export(self, kind: WeightKind) -> Weights:
        return self._parts.policy.weights(self.version, kind)

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        return self._parts.score(ids, first)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._parts.policy.base()

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        self._parts.policy.live_in(storage)


@dataclass(frozen=True)
class _Seen:
    """What the gates measure twice."""

    held_out: list[float]
    drawn: list[list[float]]
    canaries: list[list[float]] = field(default_factory=list[list[float]])


class UndoJob:
    """The optimizer's state, and the bits that 16-bit weights lack, copied to the host: into memory that is kept from
    job to job. (Weights: updates.Held.)"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._copies = optimizer, Copies()
        self._state: dict[str, Tensor] = {}

    def mark(self) -> None:
        """The way back leads here from now on."""
        self._state = self._copies.of(self._optimizer.state())

    def back(self) -> None:
        self._optimizer.load(self._state)


class PeakMemory:
    """Beside a GPU's tensors; of a CPU's it says nothing."""

    def __init__(self, like: Tensor) -> None:
        self._device = like.device if like.is_cuda else None
        self._gib: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Whatever torch had allocated meanwhile, at most. A part that ends with an error counts, too."""
        if self._device is None:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._gib[what] = torch.cuda.max_memory_allocated(self._device) / _GIB

    def metrics(self) -> Metrics:
        """The last of each part; `reserved` is what torch keeps, and `allocated` what is in use, at this moment."""
        if self._device is None:
            return {}
        found = {f"memory/peak_{what}": gib for what, gib in self._gib.items()}
        found["memory/allocated"] = torch.cuda.memory_allocated(self._device) / _GIB
        found["memory/reserved"] = torch.cuda.memory_reserved(self._device) / _GIB
        return found


class TrainerWorker:
    def __init__(self, make_parts: Callable[[OnlineSpec], TrainerParts], tell: Callable[[JobProgress], None]) -> None:
        self._make_parts, self._tell = make_parts, tell
        self._parts: TrainerParts | None = None
        self._turn = asyncio.Lock()
        self._called_off: set[str] = set()
        """Cancelled jobs, also those that have not arrived yet: a cancellation may overtake its job."""
        self._before: int | None = None
        """The version that the candidate comes from, until it is settled."""
        self._stale = False
        """The optimizer's state is of another version than the weights: it is read from the disk before it is used."""

    async def handle(self, what: Asked) -> dict[str, Any]:
        match what:
            case Cancel(job=job):
                self._called_off.add(job)
                return {}
            case _:
                async with self._turn:
                    return msgspec.to_builtins(await self._in_turn(what))

    async def _in_turn(self, what: Asked) -> Any:
        match what:
            case Open():
                return await asyncio.to_thread(self._open, what)
            case Train():
                return await self._train(what)
            case Publish(version=version):
                return await self._publish(version)
            case Settle(version=version, keep=keep):
                return await asyncio.to_thread(self._settle, version, keep)
            case Activate(version=version):
                return await asyncio.to_thread(self._activate, version)
            case Checkpoint(keep=keep):
                return await asyncio.to_thread(self._checkpoint, keep)
            case _:
                raise TandemError(f"online: the trainer process is not asked for {type(what).__name__}")

    # --- beginning

    def _open(self, asked: Open) -> WorkerOpened:
        spec = self._spec = OnlineSpec.model_validate(asked.spec, strict=False)
        parts = self._parts = self._make_parts(spec)
        self._teacher = JobTrainerView(parts)
        trained = dict(parts.policy.trainable())
        self._store = VersionStore(
            Path(asked.versions),
            anchor_every=spec.updates.anchor_every,
            anchor_share=spec.updates.anchor_share,
            threads=spec.trainer_threads,
        )
        self._store.sweep()
        self._store.forget(set(asked.known) & self._store.named())
        parameters = sum(tensor.numel() for tensor in trained.values())
        like = next(iter(trained.values()))
        self._peaks = PeakMemory(like)
        self._rewind = UndoJob(parts.optimizer)
        if not asked.known:
            self._held = HeldVersion.of(0, trained).at_rest()
            self._store.anchor(0, trained, parts.optimizer.state())
            self._teacher.version = self._anchored = 0
            return WorkerOpened(0, self._held.digest, True, parameters, os.getpid(), trained=dict(parts.trained))
        loaded, damaged = self._store.whole(asked.active, like.device)
        for text in damaged:
            _log.error("%s", text)
        loaded.held.restore(trained)
        self._held, version = loaded.held.at_rest(), loaded.held.version
        if loaded.state is not None:
            parts.optimizer.load(loaded.state)
        self._teacher.version = version
        self._anchored = loaded.state_version if loaded.state is not None else -1
        exact = self._anchored == version
        return WorkerOpened(version, self._held.digest, exact, parameters, os.getpid(), damaged, dict(parts.trained))

    # --- a job

    async def _train(self, asked: Train) -> Trained:
        loop = asyncio.get_running_loop()

        def tell(progress: JobProgress) -> None:
            loop.call_soon_threadsafe(self._tell, progress)

        try:
            return await asyncio.to_thread(self._train_here, asked, tell)
        finally:
            self._called_off.discard(asked.job)

    def _train_here(self, asked: Train, tell: Callable[[JobProgress], None]) -> Trained:
        if self._teacher.version != asked.parent:
            raise TandemError(
                f"online: a job for version {asked.parent}, and the trainer process has {self._teacher.version}"
            )
        self._refresh_state()
        self._rewind.mark()
        self._before = asked.parent
        try:
            return self._attempt(asked, tell)
        except Cancelled as error:
            self._back()
            return Trained("cancelled", str(error))
        except (NonFinite, TandemError, OSError) as error:  # OSError: the disk has no room for the update
            self._back()
            return Trained("failed", f"{type(error).__name__}: {error}")
        except BaseException:
            self._back()
            raise

    def _attempt(self, asked: Train, tell: Callable[[JobProgress], None]) -> Trained:
        started = time.perf_counter()
        with self._peaks.of("train"):
            before = self._look(asked)
            try:
                metrics = self._steps(asked, tell)
            finally:
                self._open_parts.reference(False)
        with self._peaks.of("gates"):
            measured = self._gates(before, self._look(asked), asked)
        metrics["time/train_s"] = time.perf_counter() - started
        passed, why = gates.verdict(measured)
        rows = [GateReport(**each.row()) for each in measured]
        if not passed:
            self._back()
            return Trained("rejected", why, rows, metrics)
        if asked.job in self._called_off:
            raise Cancelled("it was called off before it was published")
        live = dict(self._open_parts.policy.trainable())
        with self._peaks.of("update"):
            written = self._store.update(asked.version, self._held, live)
        self._teacher.version = asked.version
        metrics |= self._peaks.metrics()
        return Trained(
            "passed", "", rows, metrics, written.size_bytes, written.seconds, written.digest, written.changed
        )

    def _steps(self, asked: Train, tell: Callable[[JobProgress], None]) -> Metrics:
        parts, teaching = self._open_parts, asked.teaching
        groups, judge = groups_from_wire(asked.groups, asked.job), None
        if teaching.algorithm == "self_distill":
            judge = JudgedAnswers(groups, parts.score)
            groups = judge.groups
        algorithm = parts.algorithm(teaching, judge)
        trainer = parts.trainer(algorithm, teaching, asked.parent)
        parts.reference(bool(asked.held) or algorithm.needs_reference)
        fresh = _rounds(groups, self._spec.train.batch_size, teaching.seed)
        again = groups_from_wire(asked.replay, "replay")
        own = _rounds(groups_from_wire(asked.held, "held"), self._spec.ordinary.per_step, teaching.seed)
        lesson = [each for group in groups for each in group]
        metrics: Metrics = {}
        for step in range(teaching.steps):
            if asked.job in self._called_off:
                raise Cancelled(f"it was called off before step {step + 1}")
            earlier = again[step % max(1, asked.replay_rounds) :: max(1, asked.replay_rounds)]
            batch = parts.make_batch([*next(fresh), *earlier], algorithm, trainer.version)
            if asked.held:
                held = parts.make_batch(next(own), algorithm, trainer.version)
                for micro in held.micro:
                    micro.hold = self._spec.ordinary.weight / held.totals.tokens
                batch.micro += held.micro
            metrics = trainer.step(batch)
            if metrics.get("train/set_aside"):
                raise NonFinite(f"step {step + 1}: the loss or a gradient is not finite")
            told = {name: value for name, value in metrics.items() if math.isfinite(value)}
            tell(JobProgress(asked.job, step + 1, teaching.steps, told))
            metrics["train/steps"] = step + 1.0
            if teaching.known:
                known = _known(lesson, teaching.known, parts.losses)
                metrics["train/known"] = float(known)
                if known:
                    break
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _look(self, asked: Train) -> _Seen:
        """Before the first step, and after the last."""
        parts = self._open_parts
        return _Seen(
            [-_mean(parts.losses(sample)) for sample in parts.held_out],
            [parts.score([*prompt, *said], len(prompt)) for prompt, said in asked.drawn],
            [parts.score([*each.prompt_ids, *each.expected_ids], len(each.prompt_ids)) for each in parts.canaries],
        )

    def _gates(self, before: _Seen, after: _Seen, asked: Train) -> list[GateOutcome]:
        spec, parts = self._spec.gates, self._open_parts
        change = size_of_change(self._held.tensors, dict(parts.policy.trainable()), beside=parts.frozen_norm)
        numbers = [*after.held_out, *(value for each in (*after.drawn, *after.canaries) for value in each)]
        found = [gates.finite(change, numbers), gates.update_norm(change, max_relative=spec.update_norm)]
        if parts.held_out:
            found.append(gates.held_out(before.held_out, after.held_out, max_rise=spec.held_out_rise))
        if asked.drawn:
            found.append(gates.kl(list(zip(before.drawn, after.drawn, strict=True)), limit=spec.kl))
        for each, then, now in zip(parts.canaries, before.canaries, after.canaries, strict=True):
            said = parts.greedy(each.prompt_ids, len(each.expected_ids)) if each.exact else None
            found.append(
                gates.canary(
                    each.name,
                    expected_ids=each.expected_ids,
                    said_ids=said,
                    before=then,
                    after=now,
                    max_drop=spec.canary_drop,
                )
            )
        return found

    # --- afterwards

    def _back(self) -> None:
        """As it was before the job, bit for bit."""
        assert self._before is not None
        live = dict(self._open_parts.policy.trainable())
        if self._held.version != self._before:
            with self._held.beside(live):
                self._store.move(self._held, self._before)
        self._held.restore(live)
        self._rewind.back()
        self._teacher.version = self._before
        self._before = None

    def _settle(self, version: int, keep: bool) -> dict[str, Any]:
        if self._before is not None and self._teacher.version == version:
            if keep:
                self._before = None
            else:
                self._back()
        version = self._teacher.version
        return {"version": version, "anchor_due": self._store.anchor_due(version), "memory": self._peaks.metrics()}

    async def _publish(self, version: int) -> dict[str, Any]:
        if version != self._teacher.version:
            raise TandemError(f"online: asked to publish {version}; the trainer has {self._teacher.version}")
        with self._peaks.of("publish"):
            proof: Proof = await self._open_parts.publisher.publish(self._teacher)
        return {**msgspec.to_builtins(proof), "base": self._open_parts.base()}

    def _activate(self, version: int) -> dict[str, Any]:
        live = dict(self._open_parts.policy.trainable())
        with self._peaks.of("activate"), self._held.within(live):
            if why := self._store.move(self._held, version):
                _log.warning("version %d was read from an anchor: %s", version, why)
        self._teacher.version, self._before, self._stale = version, None, True
        return {"version": version, "digest": self._held.digest, "memory": self._peaks.metrics()}

    def _refresh_state(self) -> None:
        """After another version was made the active one: the optimizer goes on from the state of the last checkpoint on
        the way to that version, as it would after a restart."""
        if not self._stale:
            return
        version, self._anchored, self._stale = self._teacher.version, -1, False
        if (found := self._store.state_of(version)) is not None:
            state, self._anchored = found
            self._open_parts.optimizer.load(state)
        for name, why in self._store.without_state.items():
            behind = f"that of version {self._anchored}" if found else "the one that it has"
            _log.error("version %d goes on with an older optimizer, or %s: %s: %s", version, behind, name, why)

    def _checkpoint(self, keep: Sequence[int]) -> UpdateWritten:
        self._refresh_state()
        version = self._teacher.version
        known = self._store.known().get(version)
        if self._anchored == version or (known and known.anchored):
            return UpdateWritten(version, 0, 0.0, already=True)
        with self._held.beside(dict(self._open_parts.policy.trainable())):
            written = self._store.anchor(version, self._held.tensors, self._open_parts.optimizer.state())
        self._anchored = version
        self._store.forget(set(keep) & self._store.named())
        return UpdateWritten(version, written.size_bytes, written.seconds)

    @property
    def _open_parts(self) -> TrainerParts:
        if self._parts is None:
            raise TandemError("online: the trainer process was not opened")
        return self._parts


def _rounds(groups: Sequence[Group], size: int, seed: int) -> Iterator[list[Group]]:
    """Every group once a round, each round in a new order."""
    rng = random.Random(seed)
    waiting: list[Group] = []
    while True:
        while len(waiting) < min(size, len(groups)):
            order = list(groups)
            rng.shuffle(order)
            waiting += order
        yield waiting[:size]
        waiting = waiting[size:]


def _known(lesson: list[Trajectory], least: float, logprobs: Callable[[Trajectory], list[float]]) -> bool:
    """Whether every trained token has this probability. The sample that shows that it is not so comes first the next
    time: until all is known, one is looked at after most steps."""
    for number, sample in enumerate(lesson):
        if min(logprobs(sample)) < math.log(least):
            lesson.insert(0, lesson.pop(number))
            return False
    return True


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
