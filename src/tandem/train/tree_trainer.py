"""A trainer whose gradients are summed in an order that depends on the micro-batches alone (train/gradient_tree.py).

It is the trainer of one process with `parallel.shares` above 1, and what every rank of a crew has. A step is in two
parts, so that what is decided between them is decided on the numbers of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.protocols import Algorithm, Optimizer, Policy
from tandem.train import balance
from tandem.train.batch_packing import plain_row
from tandem.train.gradient_release import clip_scale
from tandem.train.gradient_tree import (
    Gradients,
    OneRank,
    Rounds,
    TreeSum,
    largest_of,
    norm_of,
    row_squares,
    sum_in_steps,
)
from tandem.train.kl_estimate import set_kl
from tandem.train.logprob_gap import Gap, GapRow
from tandem.train.memory_accounting import size_bytes
from tandem.train.step_sums import StepSums
from tandem.train.trainer import PolicyTrainer
from tandem.types import Batch, Metrics, MicroBatch, Totals


class Report(TypedDict):
    """What one micro-batch adds to the metrics of its step."""

    sums: dict[str, float]
    gap: tuple[list[tuple[int, GapRow]], int]


class TreeTrainer(PolicyTrainer):
    """`rounds`: where gradients come from. `update_metrics`: of the sums that the optimizer returns. `shares` and
    `by_step` say what is a leaf of the sum (train/balance.py)."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        *,
        update_metrics: Callable[[Sequence[float]], Metrics],
        shares: int,
        by_step: bool,
        rounds: Rounds | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy, algorithm, optimizer, **options)
        if options.get("release"):
            raise SpecError(
                f"{options['stage']}.gradient_release = true: does not go with parallel.shares above 1, whose "
                "gradients are summed over micro-batches; set gradient_release = false"
            )
        self._update_metrics = update_metrics
        self._shares, self._by_step = shares, by_step
        self._rounds = rounds or OneRank(self._parameters)
        self._gradients: Gradients = {}

    # --- the parts of a step on this rank

    def backward(
        self,
        micros: Sequence[MicroBatch | None],
        widths: Sequence[int],
        present: Sequence[Sequence[bool]],
        totals: Totals,
        computed: int,
    ) -> list[Report]:
        """`widths`: how many micro-batches each round has; None where this rank has none and only takes part.
        `present`: of each round, which ranks have a leaf."""
        tree, gradients = TreeSum(), Gradients()
        found: list[tuple[StepSums, Gap]] = []
        ahead = iter(micros)
        for number, (width, there) in enumerate(zip(widths, present, strict=True), start=1):
            self._rounds.begin(there, first=number == 1)
            for left in reversed(range(width)):
                self.on_micro_batch()
                micro = next(ahead)
                self._rounds.before(last=left == 0)
                if micro is None:
                    self._take_part()
                else:
                    sums, gap = StepSums(), Gap()
                    self._loss(micro, totals, computed, sums, gap).backward()
                    found.append((sums, gap))
                self._rounds.after(counts=micro is not None)
            gradients = self._rounds.end(last=number == len(widths))
            if not self._rounds.running:
                tree.add(gradients)
        self._gradients = gradients if self._rounds.running else tree.take()
        self._rounds.settle()
        return [{"sums": sums.read(), "gap": gap.numbers()} for sums, gap in found]

    def squares(self) -> Tensor:
        """Of the gradients, by which the norm is computed (row_squares)."""
        return row_squares(self._gradients)

    def conclude(self, lr: float, scale: float) -> list[float]:
        """Move the weights, and return what became of it as sums. A negative `scale`: leave them as they are."""
        gradients, self._gradients = self._gradients, {}
        if scale < 0:
            return []
        with self._memory.exact():
            self._optimizer.update(gradients, lr, scale)
        return list(self._optimizer.drain_sums())

    def _take_part(self) -> None:
        """In the gathering and reducing of the other ranks, with a micro-batch that adds nothing."""
        micro = plain_row([0, 0], 1, self._parameters[0][1].device)
        if self._algorithm.needs_reference:
            self._policy.reference_logprobs(micro, **self._sampling)
        (self._policy.logprobs(micro, **self._sampling).logprobs_N.sum() * 0.0).backward()

    # --- a step of one rank

    def _whole_step(self, batch: Batch, lr: float) -> Metrics | None:
        if self._algorithm.needs_kl:
            set_kl(self._policy, [batch], **self._sampling)
        leaves = balance.leaves(batch.micro, self._shares, by_step=self._by_step)
        micros, widths = [micro for leaf in leaves for micro in leaf], list(map(len, leaves))
        reports = self.backward(micros, widths, [[True]] * len(leaves), batch.totals, computed_tokens(batch))
        squares = self.squares()
        largest = largest_of(squares)
        metrics, scale = self._decided(batch, reports, norm_of(sum_in_steps(squares, largest), largest))
        memory = self._memory.metrics(size_bytes(self._gradients.values()), len(batch.micro))
        sums = self.conclude(lr, scale)
        return None if scale < 0 else {**metrics, **memory, **self._moved(sums)}

    def _decided(self, batch: Batch, reports: Sequence[Report], norm: float) -> tuple[Metrics, float]:
        """The step's metrics, and by what the gradient is multiplied; below 0 if the batch is set aside. `reports`: in
        the order of the leaves."""
        sums, gap = StepSums(), Gap()
        for report in reports:
            sums.add(report["sums"])
            gap.join(Gap.of(report["gap"]))
        metrics = {"loss/total": 0.0, **sums.read(), **self.gap_watch.accept(gap)}
        if not (math.isfinite(norm) and math.isfinite(metrics["loss/total"])):
            self._set_aside(batch, f"loss {metrics['loss/total']}, gradient norm {norm}")
            return metrics, -1.0
        return {**metrics, "grad/norm": norm}, clip_scale(norm, self._clip_norm)

    def _moved(self, sums: Sequence[float]) -> Metrics:
        """As float32, which is what the sums are worth: how they were added up does not show."""
        return {name: torch.tensor(value).item() for name, value in self._update_metrics(sums).items()}


def computed_tokens(batch: Batch) -> int:
    return sum(len(micro.target_N) for micro in batch.micro if not micro.hold)
