"""Build optimizers: one rule for matrices, one for all others, and both over the rows of several ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.protocols import Optimizer
from tandem.spec.optim import (
    AdamW8bitSpec,
    AdamWOffloadSpec,
    AdamWSpec,
    ApolloMiniSpec,
    MuonSpec,
    OptimizerSpec,
    OwnOptimizerSpec,
)
from tandem.spec.train import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.optim.by_owner import RankGroup
    from tandem.optim.master_weights import Master
    from tandem.optim.update_rule import RoundRule, UpdateRule

Shapes = Mapping[str, Sequence[int]]
"""Of whole tensors, where the policy holds rows of them."""


def of_stage(
    stage: Stage,
    policy: Any,
    master: Master,
    seed: int,
    *,
    shapes: Shapes | None = None,
    ranks: RankGroup | None = None,
    by_row: bool = True,
    uncounted: Collection[str] = (),
) -> Optimizer:
    """Build the optimizer of one stage. `ranks`: those that have the other rows of each tensor. `uncounted`: what they
    have, too, and count in the metrics."""
    return optimizer(
        policy.trainable(),
        stage.optimizer,
        master=master,
        tables=policy.tables(),
        lora_plus=stage.lora_plus,
        seed=seed,
        shapes=shapes,
        ranks=ranks,
        by_row=by_row,
        uncounted=uncounted,
    )


def optimizer(
    named_parameters: Sequence[tuple[str, Tensor]],
    spec: OptimizerSpec,
    *,
    master: Master,
    tables: Collection[str],
    lora_plus: float,
    seed: int,
    shapes: Shapes | None = None,
    ranks: RankGroup | None = None,
    by_row: bool = False,
    uncounted: Collection[str] = (),
) -> Optimizer:
    """Build the optimizer. `tables`: names of the tensors with one row per token (embeddings and head)."""
    from tandem.optim.optimizer import Optimizer

    def is_matrix(name: str, shape: Sequence[int]) -> bool:
        return len(shape) >= 2 and name not in tables

    matrices, others = rules(spec, seed, shapes)
    in_rounds: RoundRule | None = None
    if ranks is not None and not matrices.by_rows:
        assert shapes is not None, "some rows do not tell a tensor's shape"
        for_all = others is matrices
        in_rounds = by_owner(
            spec, matrices, ranks, {name: shape for name, shape in shapes.items() if for_all or is_matrix(name, shape)}
        )
        matrices, others = in_rounds, in_rounds if for_all else others
    return Optimizer(
        named_parameters,
        {name: matrices if is_matrix(name, tensor.shape) else others for name, tensor in named_parameters},
        master,
        weight_decay=spec.weight_decay,
        lr_scale={name: lora_plus for name, _ in named_parameters if ".lora_B." in name},
        by_row=by_row,
        in_rounds=in_rounds,
        shapes=shapes,
        uncounted=uncounted,
    )


def rules(spec: OptimizerSpec, seed: int, shapes: Shapes | None = None) -> tuple[UpdateRule, UpdateRule]:
    """Return two update rules: for matrices, and for embeddings, head and vectors, which no matrix rule suits."""
    from tandem.optim import adafactor, adamw, adamw_8bit, adamw_offload, apollo, muon, own

    if isinstance(spec, ApolloMiniSpec):
        in_8_bits = spec.tables == "adamw_8bit"  # the rule itself keeps vectors in full, as they are small
        return apollo.Apollo(spec, seed), adamw_8bit.AdamW8bit(spec, shapes) if in_8_bits else adamw.AdamW(spec)
    if isinstance(spec, MuonSpec):
        return muon.Muon(spec), adamw.AdamW(spec)
    rule: UpdateRule
    if isinstance(spec, AdamW8bitSpec):
        rule = adamw_8bit.AdamW8bit(spec, shapes)
    elif isinstance(spec, AdamWOffloadSpec):
        rule = adamw_offload.AdamWOffload(spec)
    elif isinstance(spec, AdamWSpec):
        rule = adamw.AdamW(spec)
    elif isinstance(spec, OwnOptimizerSpec):
        rule = own.make(spec)
    else:
        rule = adafactor.Adafactor(spec)
    return rule, rule


def by_owner(spec: OptimizerSpec, rule: UpdateRule, ranks: RankGroup, shapes: Shapes) -> RoundRule:
    """Return the rule for ranks that have some rows of each tensor. `shapes`: of all tensors that it updates."""
    import torch

    from tandem.optim import muon
    from tandem.optim.by_owner import ByOwner, Owners

    if isinstance(spec, MuonSpec):
        return muon.MuonByOwner(spec, Owners(ranks, shapes, muon.WIRE))
    return ByOwner(rule, Owners(ranks, shapes, torch.float32))
