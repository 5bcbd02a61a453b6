"""`[parallel]`: a trainer of several processes (ranks), each with its rows of the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class ParallelSpec(Spec):
    """How many processes train, and how they share the work."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes of the trainer, one for each GPU. 1: the trainer is one process."""
    shares: int = Field(default=0, ge=0, le=1024)
    """The micro-batches of a step come in multiples of this, and their gradients are summed in an order that depends on
    it alone. A run with the same `shares` gives the same bytes on 1, 2, 4 or 8 ranks. 0: as many as ranks."""
    layout: Literal["auto", "rows", "whole"] = "auto"
    """rows: each rank holds its rows of every tensor. whole: each rank holds all trained tensors; the frozen base of an
    adapter is held by rows. auto: whole with [model.lora], otherwise rows."""
    hosts: int = Field(default=1, ge=1, le=128)
    """Hosts of the trainer. Rows stay within a host; gradients are summed between hosts."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Most seconds that a rank may take to answer an order, beyond what the step itself takes."""

    @property
    def num_shares(self) -> int:
        """Return `shares`, or its default."""
        return self.shares or self.ranks
