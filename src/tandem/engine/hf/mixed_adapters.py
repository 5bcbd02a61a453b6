"""Serve several LoRA adapters of one base in the same forward pass: each row of a batch has one adapter, or none.

The linear layers' own forward functions are replaced by ones that add the matrices' output. The matrices of all
adapters are stacked, and those of layers with one input (q, k and v) lie side by side: their first products are one. An
adapter is written into a free slot of the stacks, and its fingerprints are taken of that memory. Names are PEFT's, as
in lora_hooks.py; B is scaled already.

A product is computed in one of two ways:
- grid: the rows are put into a grid of adapters, and each adapter's rows are multiplied with its matrices alone. If the
  batch is in the grid's order already, a product is one launch. Otherwise rows are gathered and added up one by one.
- tiles: kernels for few tokens on a GPU, as in decode steps, where launches and waiting take longer than the
  arithmetic: two launches for the layers with one input, for any order of rows (ops/adapter_rows_triton.py). The second
  adds to the outputs of them all. A CUDA graph of such a step serves every order, until the stacks move.

Shapes: R rows of a batch, T tokens of a row, K adapters in a batch, M most rows of one of them, C slots of the stacks,
L layers with one input, E rank of the stacks, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.lora_hooks import HookedAdapter
from tandem.errors import EngineError, SyncError
from tandem.ops.batched_launches import copy_all
from tandem.ops.digest import all_at_once
from tandem.ops.named_tensors import copied_to
from tandem.types import Fingerprints

_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(slots=True, eq=False)
class _Group:
    """The stacks of layers with one input. E is the largest rank; smaller ranks are filled up with zeros, and so is an
    adapter without a layer."""

    owners: tuple[str, ...]
    bases: tuple[Callable[[Tensor], Tensor], ...]
    """The layers' own forward functions, without adapters."""
    a_LCIE: Tensor
    b_LCEO: list[Tensor]
    chosen: tuple[int, ...] = ()
    """Slots that `some` is of."""
    some: tuple[list[Tensor], list[Tensor]] | None = None
    """A and B of each layer, as [K, I, E] and [K, E, O]."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which row has which adapter."""

    names_R: tuple[str, ...]
    slots: tuple[int, ...]
    """Of the K adapters."""
    tokens: int = 0
    """Tokens of each row if the kernels of tiles compute them; 0 if the grid does."""
    rows_KM: Tensor | None = None
    """The row in each place of the grid; None: the rows are in the grid's order already."""
    filled: Tensor | None = None
    """The places of the grid that have a row; None: each has."""
    targets: Tensor | None = None
    """The rows of these places."""


@dataclass(slots=True)
class _Stacks:
    capacity: int = 0
    rank: int = 0
    dtype: torch.dtype = torch.float32
    groups: list[_Group] = field(default_factory=list[_Group])
    places: dict[str, tuple[_Group, int]] = field(default_factory=dict[str, tuple[_Group, int]])
    """By layer: its group, and its place there."""


class MixedAdapters:
    def __init__(self, module: Any, rows: int) -> None:
        """`rows`: most of a decode step, and the most tokens of a prefill that the kernels of tiles compute."""
        self._checks = HookedAdapter(module)
        self._device = next(module.parameters()).device
        self._stacks = _Stacks()
        self._kernels = kernels_for(self._device)
        self._tiles = self._kernels and self._kernels.Tiles.empty(rows, self._device)
        self._most_tokens = rows if self._kernels else 0
        self.moved = 0
        """How often the stacks were replaced."""
        self._slots: dict[str, int] = {}
        self._bases: dict[str, Callable[[Tensor], Tensor]] = {}
        self._plan: _Plan | None = None
        self._group: _Group | None = None
        self._input: Tensor | None = None
        """The group of the last layer, and its input in this pass. What its layers share:"""
        self._narrow_L: list[Tensor] = []
        """For the grid: the first products, as [K, M, E]."""
        self._outputs: list[Tensor] = []
        """For tiles: of each layer, the adapters added."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def place(self, name: str) -> int:
        """Rows in the order of these numbers cost least."""
        return self._slots.get(name, -1)

    # --- adapters

    @torch.no_grad()
    def put(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Fingerprints) -> None:
        """Hold an adapter under a name, in place of one before. SyncError, and nothing that is served changes, unless
        it fits and is what was sent."""
        self._checks.check_shapes(tensors, config)
        if odd := {str(tensor.dtype) for tensor in tensors.values()} - {str(self._stacks.dtype)}:
            raise SyncError(f"adapter '{name}': its matrices are {min(odd)}; this engine takes {self._stacks.dtype}")
        owners = {_owner(key) for key in tensors}
        free = self._free_slot(owners, rank := int(config["r"]))
        views = self._views(tensors, free, rank)
        try:
            sent = copied_to(self._device, tensors)
            copy_all((view, sent[key]) for key, view in views.items())
            found, not_finite = all_at_once(views.items())
            if not_finite:
                raise SyncError(f"adapter '{name}': '{not_finite[0]}' is not finite")
            if odd := [key for key in found if found[key] != expected.get(key)]:
                raise SyncError(f"adapter '{name}': '{odd[0]}' is not what was sent; it is not served")
        except BaseException:
            self._clear(free)
            raise
        old, self._slots[name], self._plan = self._slots.get(name), free, None
        if old is not None:
            self._clear(old)

    @torch.no_grad()
    def drop(self, name: str) -> None:
        self._plan = None
        if (slot := self._slots.pop(name, None)) is not None:
            self._clear(slot)

    def _views(self, keys: Iterable[str], slot: int, rank: int) -> dict[str, Tensor]:
        """Return an adapter's tensors as they lie in a slot."""
        views = dict[str, Tensor]()
        for key in keys:
            group, at = self._stacks.places[owner := _owner(key)]
            if key == f"{owner}.lora_A.weight":
                views[key] = group.a_LCIE[at, slot, :, :rank].T
            else:
                views[key] = group.b_LCEO[at][slot, :rank].T
        return views

    def _clear(self, slot: int) -> None:
        for group in self._stacks.groups:
            group.a_LCIE[:, slot].zero_()
            for b_CEO in group.b_LCEO:
                b_CEO[slot].zero_()
            group.some = None

    def _free_slot(self, owners: set[str], rank: int) -> int:
        """Return a slot of zeros; the stacks grow first if they have none, or lack a layer or the rank."""
        stacks, taken = self._stacks, set(self._slots.values())
        free = next((slot for slot in range(stacks.capacity) if slot not in taken), stacks.capacity)
        missing = owners - stacks.places.keys()
        if missing or free == stacks.capacity or rank > stacks.rank:
            capacity = stacks.capacity if free < stacks.capacity else max(1, 2 * stacks.capacity)
            self._grow(stacks.places.keys() | owners, capacity, max(rank, stacks.rank))
        return free

    def _grow(self, owners: set[str], capacity: int, rank: int) -> None:
        old, self._stacks = self._stacks, _Stacks(capacity, rank, self._stacks.dtype)
        self.moved += 1
        for together in _grouped(owners):
            layers = [self._checks.layer(owner) for owner in together]
            inputs, num = layers[0].in_features, len(layers)
            group = _Group(
                together,
                tuple(self._base(owner) for owner in together),
                self._zeros(num, capacity, inputs, rank),
                [self._zeros(capacity, rank, layer.out_features) for layer in layers],
            )
            for at, owner in enumerate(together):
                self._stacks.places[owner] = group, at
                if owner in old.places:
                    theirs, there = old.places[owner]
                    group.a_LCIE[at, : old.capacity, :, : old.rank] = theirs.a_LCIE[there]
                    group.b_LCEO[at][: old.capacity, : old.rank] = theirs.b_LCEO[there]
            self._stacks.groups.append(group)
        for owner, (group, at) in self._stacks.places.items():
            vars(self._checks.layer(owner))["forward"] = partial(self._forward, owner, group, at)
        self._plan = None

    def _base(self, owner: str) -> Callable[[Tensor], Tensor]:
        """Return the forward function that a layer had before it had adapters."""
        return self._bases.setdefault(owner, self._checks.layer(owner).forward)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._stacks.dtype, device=self._device)

    # --- passes

    def plan(self, names: Sequence[str], tokens: int) -> bool:
        """Say which adapter each row of the next pass has; empty: none. `tokens`: of each row. Return whether a graph
        of the pass serves it: one of as many rows, since the stacks last moved."""
        names_R = tuple(names)
        by_tiles = len(names_R) * tokens <= self._most_tokens
        self._group = self._input = None  # the next pass may write its input into the same tensor
        if not any(names_R):
            self._plan = None
            return True
        if self._plan is None or (self._plan.names_R, self._plan.tokens) != (names_R, tokens if by_tiles else 0):
            self._plan = self._tiled(names_R, tokens) if by_tiles else self._planned(names_R)
        return by_tiles

    def _tiled(self, names_R: tuple[str, ...], tokens: int) -> _Plan:
        slots = [self._slots[name] if name else -1 for name in names_R for _ in range(tokens)]
        self._tiles.set(slots, self._kernels.most_tiles(len(slots), self._stacks.capacity))
        return _Plan(names_R, (), tokens)

    def _planned(self, names_R: tuple[str, ...]) -> _Plan:
        rows_of = dict[int, list[int]]()
        for row, name in enumerate(names_R):
            if name:
                rows_of.setdefault(self._slots[name], []).append(row)
        slots, most = tuple(sorted(rows_of)), max(map(len, rows_of.values()))
        grid = [row for slot in slots for row in rows_of[slot] + [-1] * (most - len(rows_of[slot]))]
        if grid == list(range(len(names_R))):
            return _Plan(names_R, slots)
        filled = [place for place, row in enumerate(grid) if row >= 0]
        return _Plan(
            names_R, slots, rows_KM=self._tensor([max(0, row) for row in grid]),
            filled=None if len(filled) == len(grid) else self._tensor(filled),
            targets=self._tensor([grid[place] for place in filled]),
        )  # fmt: skip

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _forward(self, owner: str, group: _Group, at: int, x_RTI: Tensor) -> Tensor:
        if (plan := self._plan) is None:
            return group.bases[at](x_RTI)
        if self._input is not x_RTI or self._group is not group:
            if x_RTI.dim() != 3 or x_RTI.shape[0] != len(plan.names_R) or plan.tokens not in (0, x_RTI.shape[1]):
                raise EngineError(
                    f"adapter: '{owner}' does not see the rows of the batch, so it cannot tell them apart"
                )
            self._input, self._group = x_RTI, group
            if plan.tokens:
                self._outputs = self._by_tiles(group, x_RTI)
            else:
                self._narrow_L = self._first(plan, group, x_RTI)
        if plan.tokens:
            return self._outputs[at]
        return self._second(plan, group, at, group.bases[at](x_RTI))

    def _by_tiles(self, group: _Group, x_RTI: Tensor) -> list[Tensor]:
        """Compute the outputs of all layers of a group."""
        kernels, x_RI = self._kernels, x_RTI.reshape(-1, x_RTI.shape[2])
        narrow = kernels.room(x_RI, group.a_LCIE)
        outputs = [base(x_RTI) for base in group.bases]
        kernels.narrow(x_RI, group.a_LCIE, self._tiles, narrow)
        kernels.add_wide(narrow, group.b_LCEO, [each.view(len(x_RI), -1) for each in outputs], self._tiles)
        return outputs

    def _first(self, plan: _Plan, group: _Group, x_RTI: Tensor) -> list[Tensor]:
        """Return the first products of all layers of a group in the grid: one launch if there is one adapter."""
        a_L, _ = self._some(group, plan.slots)
        grid = x_RTI.to(self._stacks.dtype)
        grid = grid if plan.rows_KM is None else grid[plan.rows_KM]
        grid = grid.reshape(len(plan.slots), -1, x_RTI.shape[2])
        if len(plan.slots) != 1 or len(a_L) == 1:
            return [torch.bmm(grid, a_KIE) for a_KIE in a_L]
        a_LIE = group.a_LCIE[:, plan.slots[0]]
        return [*torch.bmm(grid.expand(len(a_LIE), -1, -1), a_LIE).unsqueeze(1)]

    def _second(self, plan: _Plan, group: _Group, at: int, output: Tensor) -> Tensor:
        """Add a layer's adapters to its output, in place, and in the stacks' precision."""
        narrow, b_KEO = self._narrow_L[at], self._some(group, plan.slots)[1][at]
        is_narrower = output.dtype != self._stacks.dtype
        if plan.targets is None and not is_narrower:
            output.view(len(plan.slots), -1, output.shape[-1]).baddbmm_(narrow, b_KEO)
            return output
        wide = torch.bmm(narrow, b_KEO)
        if plan.targets is None:
            return output.add_(wide.view(output.shape))
        wide = wide.view(-1, *output.shape[1:])
        wide = wide if plan.filled is None else wide[plan.filled]
        if is_narrower:
            return output.add_(torch.zeros_like(output, dtype=wide.dtype).index_add_(0, plan.targets, wide))
        return output.index_add_(0, plan.targets, wide)

    def _some(self, group: _Group, slots: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the matrices of the adapters in a batch: where they lie if their slots are neighbours. Copies are kept
        until a batch has others."""
        if group.some is None or group.chosen != slots:
            first, end = slots[0], slots[-1] + 1
            chosen = slice(first, end) if slots == tuple(range(first, end)) else self._tensor(slots)
            a_LCIE, b_LCEO = ([matrix[chosen] for matrix in side] for side in (group.a_LCIE.unbind(), group.b_LCEO))
            group.chosen, group.some = slots, (a_LCIE, b_LCEO)
        return group.some


def kernels_for(device: torch.device) -> Any:
    """Return the kernels of tiles where there are any."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from tandem.ops import adapter_rows_triton

    return adapter_rows_triton


def _owner(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".")[0]


def _grouped(owners: set[str]) -> list[tuple[str, ...]]:
    """Return the layers, those with one input together."""
    groups = dict[tuple[str, str], list[str]]()
    for owner in sorted(owners):
        parent, _, last = owner.rpartition(".")
        kin = next((names[0] for names in _ONE_INPUT if last in names), last)
        groups.setdefault((parent, kin), []).append(owner)
    return [tuple(group) for group in groups.values()]
