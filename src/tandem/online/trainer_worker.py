"""The work of the trainer process: train a candidate, measure the gates, and write it as a version if it passes all.

consumes: jobs, one at a time                  waits for: the server process
produces: versions on the disk, and published; after any other outcome, the exact state before the job

It knows neither HTTP nor the jobs table. A version that it wrote counts only once the server process commits it.
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
    Cancel,
    Checkpoint,
    GateReport,
    JobProgress,
    Open,
    Publish,
    RpcCall,
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
from tandem.ops.named_tensors import Copies
from tandem.protocols import Algorithm, Optimizer, Policy, Trainer
from tandem.publish import Publisher
from tandem.spec.online import OnlineSpec
from tandem.types import Batch, Group, Metrics, Proof, Trajectory, WeightKind, Weights

_log = logging.getLogger(__name__)

_GIB = 2**30


class Cancelled(TandemError):
    """The job was cancelled between two steps."""


@dataclass(frozen=True)
class CanaryPrompt:
    """A prompt whose answer must not change."""

    name: str
    prompt_ids: list[int]
    expected_ids: list[int]
    exact: bool


@dataclass(frozen=True)
class TrainerParts:
    """The parts of the trainer process; build/online.py picks the classes."""

    policy: Policy
    optimizer: Optimizer
    trainer: Callable[[Algorithm, Teaching, int], Trainer]
    """Make the trainer of one job, at this version."""
    algorithm: Callable[[Teaching, JudgedAnswers | None], Algorithm]
    """Make the algorithm; self_distill needs the judge of its tokens."""
    make_batch: Callable[[list[Group], Algorithm, int], Batch]
    score: Callable[[Sequence[int], int], list[float]]
    """Logprobs of ids[first:]."""
    trained_logprobs: Callable[[Trajectory], list[float]]
    """Logprobs of its trained tokens."""
    greedy: Callable[[Sequence[int], int], list[int]]
    """Sample so many tokens after a prompt, greedily."""
    publisher: Publisher
    reference: Callable[[bool], None]
    """True: copy the current weights as the reference for held tokens. False: free that copy."""
    trained: Mapping[str, Any]
    """Which weights are trained: requested, engaged, why not."""
    frozen_norm: float
    """Norm of the weights that are not trained."""
    base: Callable[[], dict[str, Any]]
    """Whether the adapters' base is shared with the engine, and why not; empty without adapters."""
    held_out: Sequence[Trajectory] = ()
    canaries: Sequence[CanaryPrompt] = ()


class JobTrainerView:
    """The trainer as Publisher sees it. Its version is the server's version number, not a count of steps."""

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
class _Measured:
    """What the gates compare: measured before the first step and after the last."""

    held_out: list[float]
    drawn: list[list[float]]
    canaries: list[list[float]] = field(default_factory=list[list[float]])


class UndoJob:
    """A copy of the optimizer's state, with the bits that 16-bit weights lack, to restore after a job that is not
    published. It is in host memory that is reused by the next job. (HeldVersion restores the weights.)"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._copies = optimizer, Copies()
        self._state: dict[str, Tensor] = {}

    def mark(self) -> None:
        """Copy the current state."""
        self._state = self._copies.of(self._optimizer.state())

    def restore(self) -> None:
        self._optimizer.load(self._state)


class PeakMemory:
    """The peak GPU memory of each part of a job; measures nothing on a CPU."""

    def __init__(self, like: Tensor) -> None:
        """`like`: any tensor on the device to measure."""
        self._device = like.device if like.is_cuda else None
        self._gib: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Measure the peak of torch's allocations within this block, also if it ends with an error."""
        if self._device is None:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._gib[part] = torch.cuda.max_memory_allocated(self._device) / _GIB

    def metrics(self) -> Metrics:
        """Return the last peak of each part; `reserved` is what torch holds now, `allocated` what is in use of it."""
        if self._device is None:
            return {}
        found = {f"memory/peak_{part}": gib for part, gib in self._gib.items()}
        found["memory/allocated"] = torch.cuda.memory_allocated(self._device) / _GIB
        found["memory/reserved"] = torch.cuda.memory_reserved(self._device) / _GIB
        return found


class TrainerWorker:
    """Handles the requests of the server process, one at a time; only Cancel does not wait for its turn."""

    def __init__(self, make_parts: Callable[[OnlineSpec], TrainerParts], notify: Callable[[JobProgress], None]) -> None:
        self._make_parts, self._notify = make_parts, notify
        self._parts: TrainerParts | None = None
        self._turn = asyncio.Lock()
        self._cancelled: set[str] = set()
        """Cancelled jobs, also those that have not arrived yet: a cancellation may overtake its job."""
        self._unsettled_from: int | None = None
        """The version that the candidate was trained from, until the server settles it."""
        self._state_is_stale = False
        """Whether the optimizer's state is of another version than the weights. If so, it is read from the disk before
        its next use."""

    async def handle(self, what: RpcCall) -> dict[str, Any]:
        match what:
            case Cancel(job=job):
                self._cancelled.add(job)
                return {}
            case _:
                async with self._turn:
                    return msgspec.to_builtins(await self._in_turn(what))

    async def _in_turn(self, what: RpcCall) -> Any:
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
                raise TandemError(f"online: the trainer process does not serve {type(what).__name__}")

    # --- start

    def _open(self, request: Open) -> WorkerOpened:
        spec = self._spec = OnlineSpec.model_validate(request.spec, strict=False)
        parts = self._parts = self._make_parts(spec)
        self._trainer_view = JobTrainerView(parts)
        trained = dict(parts.policy.trainable())
        self._store = VersionStore(
            Path(request.versions),
            anchor_every=spec.updates.anchor_every,
            anchor_share=spec.updates.anchor_share,
            threads=spec.trainer_threads,
        )
        self._store.sweep()
        self._store.forget(set(request.known) & self._store.named())
        parameters = sum(tensor.numel() for tensor in trained.values())
        like = next(iter(trained.values()))
        self._peaks = PeakMemory(like)
        self._undo = UndoJob(parts.optimizer)
        if not request.known:
            self._held = HeldVersion.of(0, trained).at_rest()
            self._store.anchor(0, trained, parts.optimizer.state())
            self._trainer_view.version = self._anchored = 0
            return WorkerOpened(0, self._held.digest, True, parameters, os.getpid(), trained=dict(parts.trained))
        loaded, damaged = self._store.whole(request.active, like.device)
        for text in damaged:
            _log.error("%s", text)
        loaded.held.restore(trained)
        self._held, version = loaded.held.at_rest(), loaded.held.version
        if loaded.state is not None:
            parts.optimizer.load(loaded.state)
        self._trainer_view.version = version
        self._anchored = loaded.state_version if loaded.state is not None else -1
        exact = self._anchored == version
        return WorkerOpened(version, self._held.digest, exact, parameters, os.getpid(), damaged, dict(parts.trained))

    # --- a job

    async def _train(self, request: Train) -> Trained:
        loop = asyncio.get_running_loop()

        def notify(progress: JobProgress) -> None:
            loop.call_soon_threadsafe(self._notify, progress)

        try:
            return await asyncio.to_thread(self._train_on_thread, request, notify)
        finally:
            self._cancelled.discard(request.job)

    def _train_on_thread(self, request: Train, notify: Callable[[JobProgress], None]) -> Trained:
        if self._trainer_view.version != request.parent:
            raise TandemError(
                f"online: the job trains on from version {request.parent}, but the trainer process holds version "
                f"{self._trainer_view.version}"
            )
        self._refresh_state()
        self._undo.mark()
        self._unsettled_from = request.parent
        try:
            return self._attempt(request, notify)
        except Cancelled as error:
            self._undo_job()
            return Trained("cancelled", str(error))
        except (NonFinite, TandemError, OSError) as error:  # OSError: the disk has no room for the update
            self._undo_job()
            return Trained("failed", f"{type(error).__name__}: {error}")
        except BaseException:
            self._undo_job()
            raise

    def _attempt(self, request: Train, notify: Callable[[JobProgress], None]) -> Trained:
        started = time.perf_counter()
        with self._peaks.of("train"):
            before = self._measure(request)
            try:
                metrics = self._steps(request, notify)
            finally:
                self._open_parts.reference(False)
        with self._peaks.of("gates"):
            outcomes = self._gates(before, self._measure(request), request)
        metrics["time/train_s"] = time.perf_counter() - started
        passed, why = gates.verdict(outcomes)
        rows = [GateReport(**each.row()) for each in outcomes]
        if not passed:
            self._undo_job()
            return Trained("rejected", why, rows, metrics)
        if request.job in self._cancelled:
            raise Cancelled("it was cancelled before it was published")
        live = dict(self._open_parts.policy.trainable())
        with self._peaks.of("update"):
            written = self._store.update(request.version, self._held, live)
        self._trainer_view.version = request.version
        metrics |= self._peaks.metrics()
        return Trained(
            "passed", "", rows, metrics, written.size_bytes, written.seconds, written.digest, written.changed
        )

    def _steps(self, request: Train, notify: Callable[[JobProgress], None]) -> Metrics:
        parts, teaching = self._open_parts, request.teaching
        groups, judge = groups_from_wire(request.groups, request.job), None
        if teaching.algorithm == "self_distill":
            judge = JudgedAnswers(groups, parts.score)
            groups = judge.groups
        algorithm = parts.algorithm(teaching, judge)
        trainer = parts.trainer(algorithm, teaching, request.parent)
        parts.reference(bool(request.held) or algorithm.needs_reference)
        fresh = _shuffled_batches(groups, self._spec.train.batch_size, teaching.seed)
        replay = groups_from_wire(request.replay, "replay")
        ordinary = _shuffled_batches(
            groups_from_wire(request.held, "held"), self._spec.ordinary.per_step, teaching.seed
        )
        samples = [each for group in groups for each in group]
        metrics: Metrics = {}
        for step in range(teaching.steps):
            if request.job in self._cancelled:
                raise Cancelled(f"it was cancelled before step {step + 1}")
            replayed = replay[step % max(1, request.replay_rounds) :: max(1, request.replay_rounds)]
            batch = parts.make_batch([*next(fresh), *replayed], algorithm, trainer.version)
            if request.held:
                held = parts.make_batch(next(ordinary), algorithm, trainer.version)
                for micro in held.micro:
                    micro.hold = self._spec.ordinary.weight / held.totals.tokens
                batch.micro += held.micro
            metrics = trainer.step(batch)
            if metrics.get("train/set_aside"):
                raise NonFinite(f"step {step + 1}: the loss or a gradient is not finite")
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            notify(JobProgress(request.job, step + 1, teaching.steps, finite))
            metrics["train/steps"] = step + 1.0
            if teaching.known:
                known = _known(samples, teaching.known, parts.trained_logprobs)
                metrics["train/known"] = float(known)
                if known:
                    break
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _measure(self, request: Train) -> _Measured:
        """Called before the first step and after the last."""
        parts = self._open_parts
        return _Measured(
            [-_mean(parts.trained_logprobs(sample)) for sample in parts.held_out],
            [parts.score([*prompt, *answer], len(prompt)) for prompt, answer in request.drawn],
            [parts.score([*each.prompt_ids, *each.expected_ids], len(each.prompt_ids)) for each in parts.canaries],
        )

    def _gates(self, before: _Measured, after: _Measured, request: Train) -> list[GateOutcome]:
        spec, parts = self._spec.gates, self._open_parts
        change = size_of_change(self._held.tensors, dict(parts.policy.trainable()), beside=parts.frozen_norm)
        numbers = [*after.held_out, *(value for each in (*after.drawn, *after.canaries) for value in each)]
        outcomes = [gates.finite(change, numbers), gates.update_norm(change, max_relative=spec.update_norm)]
        if parts.held_out:
            outcomes.append(gates.held_out(before.held_out, after.held_out, max_rise=spec.held_out_rise))
        if request.drawn:
            outcomes.append(gates.kl(list(zip(before.drawn, after.drawn, strict=True)), limit=spec.kl))
        for each, then, now in zip(parts.canaries, before.canaries, after.canaries, strict=True):
            answer_ids = parts.greedy(each.prompt_ids, len(each.expected_ids)) if each.exact else None
            outcomes.append(
                gates.canary(
                    each.name,
                    expected_ids=each.expected_ids,
                    answer_ids=answer_ids,
                    before=then,
                    after=now,
                    max_drop=spec.canary_drop,
                )
            )
        return outcomes

    # --- after the job

    def _undo_job(self) -> None:
        """Restore weights and optimizer to their state before the job, bit for bit."""
        assert self._unsettled_from is not None
        live = dict(self._open_parts.policy.trainable())
        if self._held.version != self._unsettled_from:
            with self._held.on_device_of(live):
                self._store.move(self._held, self._unsettled_from)
        self._held.restore(live)
        self._undo.restore()
        self._trainer_view.version = self._unsettled_from
        self._unsettled_from = None

    def _settle(self, version: int, keep: bool) -> dict[str, Any]:
        if self._unsettled_from is not None and self._trainer_view.version == version:
            if keep:
                self._unsettled_from = None
            else:
                self._undo_job()
        version = self._trainer_view.version
        return {"version": version, "anchor_due": self._store.anchor_due(version), "memory": self._peaks.metrics()}

    async def _publish(self, version: int) -> dict[str, Any]:
        if version != self._trainer_view.version:
            raise TandemError(
                f"online: cannot publish version {version}: the trainer process holds {self._trainer_view.version}"
            )
        with self._peaks.of("publish"):
            proof: Proof = await self._open_parts.publisher.publish(self._trainer_view)
        return {**msgspec.to_builtins(proof), "base": self._open_parts.base()}

    def _activate(self, version: int) -> dict[str, Any]:
        live = dict(self._open_parts.policy.trainable())
        with self._peaks.of("activate"), self._held.using(live):
            if why := self._store.move(self._held, version):
                _log.warning("version %d was read from an anchor: %s", version, why)
        self._trainer_view.version, self._unsettled_from, self._state_is_stale = version, None, True
        return {"version": version, "digest": self._held.digest, "memory": self._peaks.metrics()}

    def _refresh_state(self) -> None:
        """If another version was activated, load the optimizer state of the last checkpoint before that version, as a
        restart would."""
        if not self._state_is_stale:
            return
        version, self._anchored, self._state_is_stale = self._trainer_view.version, -1, False
        if (found := self._store.state_of(version)) is not None:
            state, self._anchored = found
            self._open_parts.optimizer.load(state)
        for name, why in self._store.without_state.items():
            used = f"that of version {self._anchored}" if found else "the current one"
            _log.error("version %d: no optimizer state in %s (%s); training uses %s", version, name, why, used)

    def _checkpoint(self, keep: Sequence[int]) -> UpdateWritten:
        self._refresh_state()
        version = self._trainer_view.version
        known = self._store.known().get(version)
        if self._anchored == version or (known and known.anchored):
            return UpdateWritten(version, 0, 0.0, already=True)
        with self._held.on_device_of(dict(self._open_parts.policy.trainable())):
            written = self._store.anchor(version, self._held.tensors, self._open_parts.optimizer.state())
        self._anchored = version
        self._store.forget(set(keep) & self._store.named())
        return UpdateWritten(version, written.size_bytes, written.seconds)

    @property
    def _open_parts(self) -> TrainerParts:
        if self._parts is None:
            raise TandemError("online: the first request to the trainer process must be Open")
        return self._parts


def _shuffled_batches(groups: Sequence[Group], size: int, seed: int) -> Iterator[list[Group]]:
    """Yield batches without end: every group once a round, each round in a new order."""
    rng = random.Random(seed)
    waiting: list[Group] = []
    while True:
        while len(waiting) < min(size, len(groups)):
            order = list(groups)
            rng.shuffle(order)
            waiting += order
        yield waiting[:size]
        waiting = waiting[size:]


def _known(samples: list[Trajectory], least: float, logprobs: Callable[[Trajectory], list[float]]) -> bool:
    """Return whether every trained token has at least this probability. The first sample that fails moves to the front:
    it likely fails again after the next step, and then only one sample is scored."""
    for number, sample in enumerate(samples):
        if min(logprobs(sample)) < math.log(least):
            samples.insert(0, samples.pop(number))
            return False
    return True


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
