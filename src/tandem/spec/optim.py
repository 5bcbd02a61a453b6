"""`optimizer` and `schedule` of a training stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class AdamWSpec(Spec):
    """AdamW with decoupled weight decay (torch's, fused): 8 bytes of state a weight."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, never to norms and biases."""


class AdamW8bitSpec(AdamWSpec):
    """AdamW with both moments in 8 bits a number, by blocks: 2 bytes of state a weight."""

    kind: Literal["adamw_8bit"] = "adamw_8bit"  # pyright: ignore[reportIncompatibleVariableOverride]


class AdamWOffloadSpec(AdamWSpec):
    """AdamW with its moments in the host's memory, moved while other parameters are computed."""

    kind: Literal["adamw_offload"] = "adamw_offload"  # pyright: ignore[reportIncompatibleVariableOverride]


class AdafactorSpec(Spec):
    """Adafactor: row and column means, no first moment. `lr` is relative: 1e-2 is usual."""

    kind: Literal["adafactor"] = "adafactor"
    beta2_decay: float = Field(default=-0.8, lt=0)
    """The second moment's decay at step t is 1 - t ** beta2_decay."""
    clip: float = Field(default=1.0, ge=1)
    """The root mean square of an update is cut to this."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, never to norms and biases."""


class MuonSpec(AdamWSpec):
    """Muon (torch's): hidden matrices move by orthogonalised momentum; embeddings, head and vectors by AdamW."""

    kind: Literal["muon"] = "muon"  # pyright: ignore[reportIncompatibleVariableOverride]
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of the matrices."""
    newton_schulz_steps: int = Field(default=5, ge=1, le=20)
    """Iterations of the orthogonalisation."""


class ApolloMiniSpec(AdamWSpec):
    """APOLLO-Mini: a scale a matrix, from moments of rank 1. Tables and vectors move by AdamW."""

    kind: Literal["apollo_mini"] = "apollo_mini"  # pyright: ignore[reportIncompatibleVariableOverride]
    refresh_every: int = Field(default=200, ge=1)
    """Steps between two random projections."""
    scale: float = Field(default=1.0, gt=0)
    """On top of sqrt(min(rows, columns) / rank), with which one to four times AdamW's learning rate fits."""
    growth_limit: float = Field(default=1.01, gt=1)
    """The norm of a matrix's update grows by no more than this factor from step to step."""
    tables: Literal["adamw", "adamw_8bit"] = "adamw"
    """What moves embeddings and the head: AdamW with 8 bytes of state a weight, or 2: its moments in 8 bits."""


class ApolloSpec(ApolloMiniSpec):
    """APOLLO: the gradient, each channel rescaled by moments that are kept in a random low-rank projection."""

    kind: Literal["apollo"] = "apollo"  # pyright: ignore[reportIncompatibleVariableOverride]
    rank: int = Field(default=64, ge=1)
    """Of the projection; no more than the smaller side of a matrix."""


OptimizerSpec = Annotated[
    AdamWSpec | AdamW8bitSpec | AdamWOffloadSpec | AdafactorSpec | MuonSpec | ApolloSpec | ApolloMiniSpec,
    Field(discriminator="kind"),
]


class ConstantSchedule(Spec):
    """The same learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate rises linearly over the first so many steps."""


class LinearSchedule(ConstantSchedule):
    """Falls in a straight line."""

    kind: Literal["linear"] = "linear"  # pyright: ignore[reportIncompatibleVariableOverride]
    final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of `lr`."""


class CosineSchedule(LinearSchedule):
    """Falls along half a cosine."""

    kind: Literal["cosine"] = "cosine"  # pyright: ignore[reportIncompatibleVariableOverride]


ScheduleSpec = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="kind")]
