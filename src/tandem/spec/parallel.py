"""`[parallel]`: a trainer of several processes (ranks), each with its rows of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from tandem.errors import SpecError
from tandem.spec.base import Spec
from tandem.spec.model import ModelSpec
from tandem.spec.train import Stage


class ParallelSpec(Spec):
    """How many processes train, and how they share the work."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes of the trainer, one for each GPU. 1: the trainer is one process."""
    shares: int = Field(default=0, ge=0, le=1024)
    """The micro-batches of a step come in multiples of this, and their gradients are summed in an order that depends on
    it alone. A run with the same `shares` gives the same bytes on 1, 2, 4 or 8 ranks, but for `sums` = "running". 0: as
    many as ranks."""
    layout: Literal["auto", "rows", "whole"] = "auto"
    """rows: each rank holds its rows of every tensor. whole: each rank holds all trained tensors; the frozen base of an
    adapter is held by rows. auto: whole with [model.lora], otherwise rows."""
    hosts: int = Field(default=0, ge=0, le=128)
    """Each host holds every row once, on its own ranks, and gradients are summed between hosts. 1: rows are cut over
    all ranks. 0: as many as torchrun has agents, and 1 without torchrun."""
    gather: Literal["auto", "layer", "step"] = "auto"
    """How long a rank keeps the weights that it gathered from all ranks. layer: until a layer is computed, forward and
    backward. step: until the step's update, and the frozen base of adapters until the run ends; this sends less and
    takes the memory of all weights. auto: step on GPUs if that is at most 15 % of a GPU's memory, otherwise layer."""
    sums: Literal["auto", "round", "running", "step"] = "auto"
    """When gradients are summed over ranks. round: after each micro-batch, as a tree, which keeps several sums of a
    rank's rows. running: after each micro-batch, into one sum, which takes the least memory. step: once a step; each
    rank first adds up those of its own micro-batches in float32, which sends less, lets no rank wait for another within
    a step, and takes four bytes a weight. auto: round on a CPU or with `deterministic`; else step if that is at most
    25 % of a GPU's memory, otherwise running. Each adds in an order of its own, which is the same on any number of
    ranks, but for running."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Most seconds that a rank may take to answer an order, beyond what the step itself takes."""

    @property
    def num_shares(self) -> int:
        """Return `shares`, or its default."""
        return self.shares or self.ranks

    @property
    def row_shards(self) -> int:
        """Return into how many runs of rows a tensor is cut. Ranks that are so far apart hold the same rows."""
        return self.ranks // (self.hosts or 1)


ONE_PROCESS = ParallelSpec()


def check_hosts(parallel: ParallelSpec, target: str, kind: str) -> None:
    """SpecError if a control plane cannot start the run on this target, because the run needs several hosts."""
    if parallel.hosts > 1 and kind != "slurm":
        raise SpecError(
            f"parallel.hosts = {parallel.hosts}: the target '{target}' is of kind '{kind}', where a job is one host; "
            "set parallel.hosts to 1, choose a target of kind 'slurm', or start the run by torchrun (docs/parallel.md)"
        )


def settled(parallel: ParallelSpec, *, deterministic: bool) -> ParallelSpec:
    """Return the same with `sums` chosen, where that depends on the spec alone."""
    return parallel.model_copy(update={"sums": "round"}) if deterministic and parallel.sums == "auto" else parallel


def check_parallel(parallel: ParallelSpec, model: ModelSpec, stages: Mapping[str, Stage]) -> None:
    """Raise ValueError for what does not go with several ranks, before anything is loaded."""
    ranks = parallel.ranks
    if ranks % (parallel.hosts or 1):
        raise ValueError(
            f"parallel.hosts = {parallel.hosts}: does not divide parallel.ranks = {ranks}, and every host has equally "
            "many ranks; set hosts to a divisor of ranks, or leave it out"
        )
    if ranks > 1 and parallel.num_shares < ranks:
        raise ValueError(
            f"parallel.shares = {parallel.shares}: fewer micro-batches than parallel.ranks = {ranks} leave ranks "
            f"without work; set shares to {ranks} or more, or leave it out"
        )
    if parallel.num_shares > 1:
        for name, stage in stages.items():
            if stage.gradient_release:
                raise ValueError(
                    f"{name}.gradient_release = true: with parallel.shares = {parallel.num_shares} a step has several "
                    "micro-batches, whose gradients are summed first; set gradient_release = false"
                )
    if ranks == 1:
        return
    if parallel.layout == "whole" and model.lora is None:
        raise ValueError(
            "parallel.layout = 'whole': is for adapters, and every weight is trained; add [model.lora], or "
            "leave layout out"
        )
    if parallel.layout == "rows" and model.lora is not None:
        raise ValueError(
            "parallel.layout = 'rows': adapters are held whole by every rank; leave layout out, or "
            "leave [model.lora] out"
        )
    _check_model(ranks, model)


def _check_model(ranks: int, model: ModelSpec) -> None:
    if model.activations == "offload":
        raise ValueError(
            f"model.activations = 'offload': does not go with parallel.ranks = {ranks}; choose 'recompute' or "
            "'selective'"
        )
    if model.lora is not None and model.lora.base != "exact":
        raise ValueError(
            f"model.lora.base = '{model.lora.base}': a quantised base cannot be cut into rows; leave base out, or set "
            "parallel.ranks = 1"
        )
