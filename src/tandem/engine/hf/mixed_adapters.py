"""Serve several LoRA adapters of one base in the same forward pass: each row of a batch has one adapter, or none.

Shapes: R rows of a batch, T tokens of a row, K adapters in a batch, M most rows of one of them, N adapters in memory.
Forward hooks on the linear layers add the matrices' output. The matrices of a layer are stacked, so that a layer costs
two products for the whole batch, whatever the number of adapters. Names are PEFT's, as in lora_hooks.py; B is scaled
already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.lora_hooks import HookedAdapter
from tandem.errors import EngineError, SyncError
from tandem.ops.digest import fingerprints
from tandem.types import Fingerprints


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which row has which adapter. `alone`: all rows have this one. Otherwise rows are put into a grid [K, M]."""

    names_R: tuple[str, ...]
    alone: int | None = None
    slots: tuple[int, ...] = ()
    """Of the K adapters, among those in memory."""
    rows_KM: Tensor | None = None
    """The row in each place of the grid; None: the rows are in the grid's order already."""
    filled: Tensor | None = None
    """The places of the grid that have a row; None: each has."""
    targets: Tensor | None = None
    """The rows of these places."""


class MixedAdapters:
    def __init__(self, module: Any) -> None:
        self._module, self._checks = module, HookedAdapter(module)
        self._device = next(module.parameters()).device
        self._held: dict[str, Mapping[str, Tensor]] = {}
        self._stacks: dict[str, tuple[Tensor, Tensor]] = {}
        """A as [N, in, rank] and B as [N, rank, out], by layer."""
        self._hooks: list[Any] = []
        self._some_slots: tuple[int, ...] = ()
        self._some: dict[str, tuple[Tensor, Tensor]] = {}
        self._plan: _Plan | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def put(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Fingerprints) -> None:
        """Hold an adapter under a name, in place of one before. SyncError, and nothing changes, unless it fits and is
        what was sent."""
        self._checks.check(tensors, config)
        own = {key: tensor.to(self._device, copy=True) for key, tensor in tensors.items()}
        found = fingerprints(own)
        if odd := [key for key in found if found[key] != expected.get(key)]:
            raise SyncError(f"adapter '{name}': '{odd[0]}' is not what was sent; it is not served")
        self._restack({**self._held, name: own})

    def drop(self, name: str) -> None:
        self._restack({key: tensors for key, tensors in self._held.items() if key != name})

    def plan(self, names: Sequence[str]) -> None:
        """Say which adapter each row of the next passes has; empty: none."""
        names_R = tuple(names)
        if not any(names_R):
            self._plan = None
        elif self._plan is None or self._plan.names_R != names_R:
            self._plan = self._planned(names_R)

    def _planned(self, names_R: tuple[str, ...]) -> _Plan:
        slot_of = {name: slot for slot, name in enumerate(self._held)}
        rows_of = dict[int, list[int]]()
        for row, name in enumerate(names_R):
            if name:
                rows_of.setdefault(slot_of[name], []).append(row)
        slots, most = tuple(sorted(rows_of)), max(map(len, rows_of.values()))
        if len(slots) == 1 and all(names_R):
            return _Plan(names_R, alone=slots[0])
        grid = [row for slot in slots for row in rows_of[slot] + [-1] * (most - len(rows_of[slot]))]
        if grid == list(range(len(names_R))):
            return _Plan(names_R, slots=slots)
        filled = [place for place, row in enumerate(grid) if row >= 0]
        return _Plan(
            names_R, slots=slots, rows_KM=self._tensor([max(0, row) for row in grid]),
            filled=None if len(filled) == len(grid) else self._tensor(filled),
            targets=self._tensor([grid[place] for place in filled]),
        )  # fmt: skip

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _stacks_of(self, owner: str, slots: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the matrices of the adapters in a batch. They are kept until a batch has others."""
        whole = self._stacks[owner]
        if len(slots) == len(self._held):
            return whole
        if self._some_slots != slots:
            self._some_slots, self._some = slots, {}
        if owner not in self._some:
            chosen = self._tensor(slots)
            self._some[owner] = whole[0][chosen], whole[1][chosen]
        return self._some[owner]

    def _restack(self, held: dict[str, Mapping[str, Tensor]]) -> None:
        owners = sorted(
            {key.removesuffix(".lora_A.weight") for each in held.values() for key in each if ".lora_A." in key}
        )
        stacks = {owner: self._stacked(owner, list(held.values())) for owner in owners}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._checks.layer(owner).register_forward_hook(partial(self._add, owner)) for owner in owners]
        self._held, self._stacks, self._plan = held, stacks, None
        self._some_slots, self._some = (), {}

    def _stacked(self, owner: str, held: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the matrices of a layer; smaller ranks are filled up with zeros, and so is an adapter without it."""
        layer, of_layer = self._checks.layer(owner), f"{owner}.lora_A.weight"
        some = next(each[of_layer] for each in held if of_layer in each)
        rank = max(each[of_layer].shape[0] for each in held if of_layer in each)
        a_NIR = torch.zeros(len(held), layer.in_features, rank, dtype=some.dtype, device=self._device)
        b_NRO = torch.zeros(len(held), rank, layer.out_features, dtype=some.dtype, device=self._device)
        for number, each in enumerate(held):
            if (a := each.get(of_layer)) is not None:
                a_NIR[number, :, : a.shape[0]] = a.T
                b_NRO[number, : a.shape[0]] = each[f"{owner}.lora_B.weight"].T
        return a_NIR, b_NRO

    def _add(self, owner: str, _layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if (plan := self._plan) is None:
            return output
        x_RTI = inputs[0]
        if x_RTI.dim() != 3 or x_RTI.shape[0] != len(plan.names_R):
            raise EngineError(f"adapter: '{owner}' does not see the rows of the batch, so it cannot tell them apart")
        if plan.alone is not None:
            a_NIR, b_NRO = self._stacks[owner]
            return output + (x_RTI.to(a_NIR.dtype) @ a_NIR[plan.alone] @ b_NRO[plan.alone]).to(output.dtype)
        a_KIR, b_KRO = self._stacks_of(owner, plan.slots)
        grid = (x_RTI if plan.rows_KM is None else x_RTI[plan.rows_KM]).to(a_KIR.dtype)
        narrow = torch.bmm(grid.reshape(len(a_KIR), -1, grid.shape[-1]), a_KIR)
        if plan.targets is None and output.dtype == b_KRO.dtype:
            return torch.baddbmm(output.view(len(b_KRO), -1, output.shape[-1]), narrow, b_KRO).view(output.shape)
        wide = torch.bmm(narrow, b_KRO).reshape(-1, *output.shape[1:]).to(output.dtype)
        if plan.targets is None:
            return output + wide
        return output.index_add(0, plan.targets, wide if plan.filled is None else wide[plan.filled])
