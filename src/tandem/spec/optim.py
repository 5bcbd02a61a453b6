"""`optimizer` and `schedule` of a training stage: the optimizer and the learning rate over time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.spec.base import Spec
from tandem.spec.own import OwnName, as_own


class AdamWSpec(Spec):
    """AdamW with decoupled weight decay (torch's fused kernel): 8 bytes of state per weight."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay rates of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator, so that it is never 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices; norms and biases have none."""


class AdamW8bitSpec(AdamWSpec):
    """AdamW with both moments quantised to 8 bits by blocks: 2 bytes of state per weight."""

    kind: Literal["adamw_8bit"] = "adamw_8bit"  # pyright: ignore[reportIncompatibleVariableOverride]


class AdamWOffloadSpec(AdamWSpec):
    """AdamW with its moments in the host's memory; they are copied while other parameters are updated."""

    kind: Literal["adamw_offload"] = "adamw_offload"  # pyright: ignore[reportIncompatibleVariableOverride]


class AdafactorSpec(Spec):
    """Adafactor: row and column means, no first moment. `lr` is relative to the weights; 1e-2 is usual."""

    kind: Literal["adafactor"] = "adafactor"
    beta2_decay: float = Field(default=-0.8, lt=0)
    """The second moment's decay at step t is 1 - t ** beta2_decay."""
    clip: float = Field(default=1.0, ge=1)
    """Largest root mean square of an update; a larger update is scaled down."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices; norms and biases have none."""


class MuonSpec(AdamWSpec):
    """Muon (torch's): orthogonalised momentum for hidden matrices, AdamW for embeddings, head and vectors."""

    kind: Literal["muon"] = "muon"  # pyright: ignore[reportIncompatibleVariableOverride]
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the matrices."""
    newton_schulz_steps: int = Field(default=5, ge=1, le=20)
    """Iterations of the orthogonalisation."""


class ApolloMiniSpec(AdamWSpec):
    """APOLLO-Mini: one scale per matrix, from moments of rank 1; AdamW for embeddings, head and vectors."""

    kind: Literal["apollo_mini"] = "apollo_mini"  # pyright: ignore[reportIncompatibleVariableOverride]
    refresh_every: int = Field(default=200, ge=1)
    """Steps between two random projections."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the update, besides sqrt(min(rows, columns) / rank). With 1, one to four times AdamW's learning rate
    is right."""
    growth_limit: float = Field(default=1.01, gt=1)
    """Largest growth factor of the norm of a matrix's update from step to step."""
    tables: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer of embeddings and head: AdamW with 8 bytes of state per weight, or with 8-bit moments and 2 bytes."""


class ApolloSpec(ApolloMiniSpec):
    """APOLLO: rescales each channel of the gradient, by moments of a random low-rank projection."""

    kind: Literal["apollo"] = "apollo"  # pyright: ignore[reportIncompatibleVariableOverride]
    rank: int = Field(default=64, ge=1)
    """Rank of the projection; at most the smaller side of a matrix is used."""


class OwnOptimizerSpec(Spec):
    """An optimizer of your own, from a file; `kind = "mine.py:Lion"` says the same. docs/your_own.md has an example."""

    kind: Literal["own"] = "own"
    name: OwnName = Field(min_length=1)
    """A class with `init` and `update`, or a function `update` that keeps no state, as `file.py:name`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or of the function; unknown ones are refused."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices, applied before each update; norms and biases have none."""
    state_bytes: float = Field(default=8.0, ge=0)
    """Bytes of state per weight, for the plan of the run; 4 for each fp32 tensor that `init` makes."""


OptimizerSpec = Annotated[
    Annotated[
        AdamWSpec | AdamW8bitSpec | AdamWOffloadSpec | AdafactorSpec | MuonSpec | ApolloSpec | ApolloMiniSpec
        | OwnOptimizerSpec,
        Field(discriminator="kind"),
    ],
    BeforeValidator(as_own),
]  # fmt: skip


class ConstantSchedule(Spec):
    """Constant learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """First steps over which the learning rate rises linearly; 0: none."""


class LinearSchedule(ConstantSchedule):
    """Learning rate that falls linearly."""

    kind: Literal["linear"] = "linear"  # pyright: ignore[reportIncompatibleVariableOverride]
    final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a share of `lr`."""


class CosineSchedule(LinearSchedule):
    """Learning rate that falls along half a cosine."""

    kind: Literal["cosine"] = "cosine"  # pyright: ignore[reportIncompatibleVariableOverride]


ScheduleSpec = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="kind")]
