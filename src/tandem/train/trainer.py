"""Turn a Batch into a new version of the weights."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.errors import NonFinite, SpecError
from tandem.io import atomic_write
from tandem.ops.named_tensors import Copies, check_alike
from tandem.protocols import Algorithm, Optimizer, Policy
from tandem.train.batch_packing import plain_row
from tandem.train.gradient_release import Collected, Released, clip_scale, total_norm
from tandem.train.kl_estimate import set_kl
from tandem.train.logprob_gap import CalibratedLimit, Gap, GapWatch
from tandem.train.memory_accounting import MemoryBreakdown, size_bytes
from tandem.train.move_meter import MoveMeter
from tandem.train.no_learning_check import Guard
from tandem.train.step_sums import StepSums
from tandem.types import Batch, Metrics, MicroBatch, Totals, WeightKind, Weights

_log = logging.getLogger(__name__)


class PolicyTrainer:
    """The trainer of one process. `lr(step)` counts the steps of this stage from 0; `version` those of the whole run.

    `release` applies each gradient during the backward pass (train/gradient_release.py describes the costs).
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        *,
        lr: Callable[[int], float],
        clip_norm: float,
        version: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_logprob_gap: float | CalibratedLimit = math.inf,
        max_idle_steps: int = 1000,
        release: bool = False,
        measure_moves: bool = False,
        stage: str = "train",
    ) -> None:
        """`measure_moves`: measure what each update moves, for the gap of tokens of older versions."""
        self.version = version
        self.set_aside: list[list[str]] = []
        """Task ids of batches whose loss or gradient was not finite."""
        self._first_version = version
        self._policy, self._algorithm, self._optimizer = policy, algorithm, optimizer
        self._lr, self._clip_norm = lr, clip_norm
        self.gap_watch = GapWatch(max_logprob_gap)
        self._meter = MoveMeter() if measure_moves else None
        self._sampling = {"temperature": temperature, "top_p": top_p}
        self._guard = Guard(max_idle_steps)
        self._memory = MemoryBreakdown(policy, optimizer, top_p)
        self.gives_memory_back = self._memory.gives_back
        """Whether to return free host memory to the system; ops/release_host_memory.py says if that is possible."""
        self._stage = stage
        self._copies = {"weights": Copies(), "optimizer": Copies()}
        self._deploy: Callable[[Mapping[str, Tensor], Path], None] | None = None
        self.on_micro_batch: Callable[[], None] = lambda: None
        """Called before each micro-batch, to count progress."""
        self._parameters = list(policy.trainable())
        self._collected = Collected(self._parameters)
        self._released = Released(self._parameters, optimizer, clip_norm) if release else None

    def step(self, batch: Batch) -> Metrics:
        lr = self._lr(self.version - self._first_version)
        metrics = self._release_step(batch, lr) if self._released else self._whole_step(batch, lr)
        if metrics is None:
            return {**batch.metrics, "train/set_aside": 1.0}
        self.version += 1
        metrics |= self._optimizer.drain_metrics() | self._memory.peak()
        self._guard.stepped(self.version, batch, metrics)
        return {**batch.metrics, **metrics, "lr": lr, "train/set_aside": 0.0}

    def finish(self) -> None:
        self._guard.finish(self.version - self._first_version)

    def export(self, kind: WeightKind) -> Weights:
        return self._policy.weights(self.version, kind)

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        """Return the logprobs of ids[first:] at temperature 1."""
        return self._policy.score(plain_row(ids, first, self._parameters[0][1].device), 1.0).tolist()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.base()

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        self._policy.live_in(storage)

    def save(self, path: Path) -> None:
        """Write weights, optimizer state with the bits that 16-bit weights lack, and step counters."""
        with atomic_write.directory(path) as directory:
            self._copied()[0](directory)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state now; return a function that writes it as `save` does, with a deployable copy beside it."""
        write, weights = self._copied()
        deploy = self._deploy = self._deploy or self._policy.deployer()

        def write_both(directory: Path) -> None:
            write(directory)
            deploy(weights, directory / "deploy")

        return write_both

    def _copied(self) -> tuple[Callable[[Path], None], Mapping[str, Tensor]]:
        """Copy the state, into memory that the next copy reuses. Return the function that writes it, and the
        weights."""
        kinds = {"weights": dict(self._parameters), "optimizer": self._optimizer.state()}
        copies = {file: self._copies[file].of(tensors) for file, tensors in kinds.items()}
        clock = self._clock()

        def write(directory: Path) -> None:
            for file, tensors in copies.items():
                save_file(tensors, directory / f"{file}.safetensors")
            (directory / "trainer.json").write_text(json.dumps(clock))

        return write, copies["weights"]

    def _clock(self) -> dict[str, Any]:
        """Return the content of trainer.json."""
        return {
            "version": self.version,
            "first_version": self._first_version,
            "running_norm": self._released.running_norm if self._released else 0.0,
            "guard": self._guard.state(),
            "gap": self.gap_watch.state(),
        }

    def load(self, path: Path) -> None:
        """Load what `save` wrote; if anything does not match, change nothing."""
        clock = json.loads((path / "trainer.json").read_text())
        saved = load_file(path / "weights.safetensors")
        check_alike(dict(self._parameters), saved, f"{path}: the saved weights belong to another model or precision")
        self._optimizer.load(load_file(path / "optimizer.safetensors"))
        with torch.no_grad():
            for name, tensor in self._parameters:
                tensor.copy_(saved[name])
        self._take_clock(clock)

    def _take_clock(self, clock: Mapping[str, Any]) -> None:
        self.version, self._first_version = clock["version"], clock["first_version"]
        self._guard.load(clock["guard"])
        if "gap" in clock:
            self.gap_watch.load(clock["gap"])
        if self._released:
            self._released.running_norm = clock["running_norm"]

    def gradients_of(self, batch: Batch) -> tuple[Metrics, dict[str, Tensor]]:
        """Run forward and backward; return metrics and gradients. No weight changes."""
        with self._collected.collecting(len(batch.micro)):
            metrics = self._forward_backward(batch)
        return metrics, self._collected.take()

    def apply(self, gradients: dict[str, Tensor], lr: float | None = None) -> Metrics:
        """Take an optimizer step by these gradients, outside `step`. `lr`: without one, that of the schedule."""
        lr = self._lr(self.version - self._first_version) if lr is None else lr
        norm = total_norm(list(gradients.values()))
        if not math.isfinite(norm):
            raise NonFinite(f"version {self.version}: the gradient's norm is {norm}; the weights are unchanged")
        moved = self._update(gradients, lr, norm)
        self.version += 1
        return {"grad/norm": norm, "lr": lr, **self._optimizer.drain_metrics(), **moved}

    def _whole_step(self, batch: Batch, lr: float) -> Metrics | None:
        metrics, gradients = self.gradients_of(batch)
        norm = total_norm(list(gradients.values()))
        if not (math.isfinite(norm) and math.isfinite(metrics["loss/total"])):
            self._set_aside(batch, f"loss {metrics['loss/total']}, gradient norm {norm}")
            return None
        memory = self._memory.metrics(size_bytes(gradients.values()), len(batch.micro))
        return {**metrics, **memory, **self._update(gradients, lr, norm), "grad/norm": norm}

    def _update(self, gradients: dict[str, Tensor], lr: float, norm: float) -> Metrics:
        """Take the optimizer's step, and return what it moved if that is measured."""
        if self._meter is not None:
            self._meter.before(self._score)
        with self._memory.exact():
            self._optimizer.update(gradients, lr, clip_scale(norm, self._clip_norm))
        return self.gap_watch.moved(self._meter.after(self._score)) if self._meter is not None else {}

    def _score(self, micro: MicroBatch) -> Tensor:
        return self._policy.score(micro, **self._sampling)

    def _release_step(self, batch: Batch, lr: float) -> Metrics | None:
        assert self._released is not None
        if len(batch.micro) > 1:
            raise SpecError(
                f"{self._stage}.gradient_release = true: a step must have one micro-batch, and this one has "
                f"{len(batch.micro)}; raise {self._stage}.micro_tokens, make the step smaller, or set "
                "gradient_release = false"
            )
        with self._released.releasing(lr):
            metrics = self._forward_backward(batch, refuse_first=True)
        if not math.isfinite(metrics["loss/total"]):
            self._set_aside(batch, f"loss {metrics['loss/total']}")
            return None
        released = self._released.metrics()
        if released["release/skipped"]:
            skipped = f"{released['release/skipped']:.0f} gradients are not finite"
            self._note_bad(batch, f"{skipped}: their weights are unchanged, others have changed")
        return {**metrics, **self._memory.metrics(self._released.largest_bytes, 1), **released}

    def _forward_backward(self, batch: Batch, *, refuse_first: bool = False) -> Metrics:
        """Run forward and backward over all micro-batches. `refuse_first`: check loss and gap before each backward
        pass, because it changes weights."""
        sums, gap = StepSums(), Gap()
        computed = sum(len(micro.target_N) for micro in batch.micro if not micro.hold)
        if self._algorithm.needs_kl:
            set_kl(self._policy, [batch], **self._sampling)
        for micro in batch.micro:
            self.on_micro_batch()
            loss = self._loss(micro, batch.totals, computed, sums, gap)
            if refuse_first and not micro.hold:
                self.gap_watch.check(gap)
                if not math.isfinite(sums.read()["loss/total"]):
                    break
            loss.backward()
        return {"loss/total": 0.0, **sums.read(), **self.gap_watch.accept(gap)}

    def _loss(self, micro: MicroBatch, totals: Totals, computed: int, sums: StepSums, gap: Gap) -> Tensor:
        """Return the loss of one micro-batch, and add its metrics to the sums. `computed`: tokens of the whole step.
        Nothing is read from the device, which else would wait for its next work."""
        if micro.hold:
            loss = micro.hold * self._policy.divergence(micro).sum()
            sums.add({"loss/held": loss, "loss/total": loss})
            return loss
        if self._algorithm.needs_reference:
            micro.reference_N = self._policy.reference_logprobs(micro, **self._sampling)
        with self._memory.forward(micro):
            scored = self._policy.logprobs(micro, **self._sampling)
        gap.add(scored, micro, self.version)
        if self._meter is not None:
            self._meter.note(micro)
        loss, token_sums = self._algorithm.loss(scored, micro, totals)
        sums.add({"loss/total": loss})
        sums.add(token_sums, computed)
        return loss

    def _set_aside(self, batch: Batch, what: str) -> None:
        self._meter = MoveMeter() if self._meter is not None else None
        self._note_bad(batch, f"{what}: the batch is skipped, the weights are unchanged")
        self._guard.bad(batch, what)

    def _note_bad(self, batch: Batch, what: str) -> None:
        self.set_aside.append(batch.task_ids)
        _log.warning("version %d: %s; its tasks: %s", self.version, what, ", ".join(dict.fromkeys(batch.task_ids)))
