"""Apply rules to parameters: learning rates, clipping, a few rows at a time, and what took effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.ops import byte_sizes
from tandem.ops.named_tensors import check_alike, in_blocks
from tandem.ops.parts import numbers_a_norm
from tandem.optim.master_weights import Master, Rows
from tandem.optim.update_rule import RoundRule, RowCut, Slot, UpdateRule, Whole
from tandem.types import Metrics

CHUNK = byte_sizes.UPDATE_CHUNK


class Optimizer:
    """Updates parameters. It makes its state at once, so that too large a model fails before the first step."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        rules: Mapping[str, UpdateRule],
        master: Master,
        *,
        weight_decay: float = 0.0,
        lr_scale: Mapping[str, float] | None = None,
        by_row: bool = False,
        in_rounds: RoundRule | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        uncounted: Collection[str] = (),
    ) -> None:
        """`by_row`: sum an update's effect row by row, so that it does not depend on which part of a parameter this
        rank has. `in_rounds`: one of the rules, which all ranks apply together. `shapes`: of whole parameters, where
        these are parts of them. `uncounted`: parameters that another rank has, too, and counts."""
        self._parameters = dict(named_parameters)
        self._rules, self._master = rules, master
        self._decay = {name: weight_decay if tensor.ndim >= 2 else 0.0 for name, tensor in named_parameters}
        self._lr_scale = dict(lr_scale or {})
        self._state = {name: rules[name].init(name, tensor.detach()) for name, tensor in named_parameters}
        self._steps = dict.fromkeys(self._parameters, 0)
        self._whole = {name for name, tensor in named_parameters if not self.why_not_whole(name, tensor.detach())}
        self._tally = _Tally()
        self._by_row, self._in_rounds, self._uncounted = by_row, in_rounds, set(uncounted)
        self._shapes = {name: (shapes or {}).get(name, tensor.shape) for name, tensor in named_parameters}

    def why_not_whole(self, name: str, live: Tensor) -> str:
        """Return why this parameter needs several operations; empty if its rule updates it in one kernel."""
        if not self._master.halves or (live.dtype != torch.float32 and name not in self._master.state()):
            return f"{type(self._master).__name__} writes weights in a way of its own"
        return self._rules[name].why_not_whole(live)

    @torch.no_grad()
    def update(self, gradients: MutableMapping[str, Tensor], lr: float, scale: float = 1.0) -> None:
        """Update the parameters that have a gradient, which must be finite and is multiplied by `scale`. Each gradient
        is removed from `gradients` and freed once it is used, so that the next ones have room."""
        for name in gradients:
            self._steps[name] += 1
        self._update_whole({name: gradients.pop(name) for name in [*gradients] if name in self._whole}, lr, scale)
        if self._in_rounds is not None:
            self._update_in_rounds(self._in_rounds, gradients, lr, scale)
        self._update_in_pieces([name for name in gradients if name not in self._uncounted], gradients, lr, scale)
        self._update_in_pieces([*gradients], gradients, lr, scale)

    def _update_in_pieces(
        self, names: Sequence[str], gradients: MutableMapping[str, Tensor], lr: float, scale: float
    ) -> None:
        pieces: list[_ParameterSlice] = []
        numbers = 0
        for name in names:
            gradient = gradients.pop(name)
            for rows in self._in_rows(name):
                count = gradient[rows].numel()
                if pieces and numbers + count > CHUNK:  # before this one is converted to fp32: bounds the memory
                    self._apply(pieces)
                    pieces, numbers = [], 0
                pieces.append(self._piece(name, rows, gradient[rows], lr, scale))
                numbers += count
        if pieces:
            self._apply(pieces)

    @property
    def workspace_bytes(self) -> int:
        """The most memory, in bytes, that an update holds."""
        named = [each for each in self._parameters.items() if each[0] not in self._whole]
        undivided = [tensor.numel() for name, tensor in named if not self._rules[name].by_rows]
        if self._in_rounds is not None:
            undivided.append(self._in_rounds.most_numbers())
        narrow = any(tensor.dtype != torch.float32 for _, tensor in named)
        return byte_sizes.update_bytes([tensor.numel() for _, tensor in named], undivided, narrow=narrow)

    def drain_metrics(self) -> Metrics:
        """Return how much of the updates since the last call took effect."""
        return metrics_of(self.drain_sums())

    def drain_sums(self) -> list[float]:
        """Return the same as sums, to which other ranks' may be added; empty without an update."""
        tally, self._tally = self._tally, _Tally()
        return tally.numbers()

    def state(self) -> dict[str, Tensor]:
        """Return everything but the served weights that the next step depends on, by parameter name."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # moments may still be on their way to the host
        found = {f"{name}|{key}": value for name, slots in self._state.items() for key, value in slots.items()}
        found |= {f"{name}|master": value for name, value in self._master.state().items()}
        return found | {f"{name}|step": torch.tensor(step) for name, step in self._steps.items()}

    def cut(self) -> dict[str, RowCut]:
        """Return where this rank's state is in that of all ranks, if it is not cut as its parameter is."""
        if self._in_rounds is None:
            return {}
        named = [name for name, rule in self._rules.items() if rule is self._in_rounds]
        return {f"{name}|{key}": cut for name in named for key, cut in self._in_rounds.cut(name).items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state; if it does not fit, change nothing."""
        ours = self.state()
        check_alike(ours, state, "optimizer: the saved state belongs to another model, optimizer or precision")
        for key, value in state.items():
            ours[key].copy_(value)
        self._steps = {name: int(state[f"{name}|step"]) for name in self._parameters}

    def _update_whole(self, gradients: Mapping[str, Tensor], lr: float, scale: float) -> None:
        by_rule: defaultdict[tuple[int, bool], list[str]] = defaultdict(list)
        for name in gradients:
            by_rule[id(self._rules[name]), name in self._uncounted].append(name)
        low = self._master.state()
        for (_, is_uncounted), names in by_rule.items():
            wholes = [
                Whole(
                    self._parameters[name].detach(),
                    low.get(name),
                    gradients[name].contiguous(),
                    scale,
                    self._state[name],
                    self._steps[name],
                    lr * self._lr_scale.get(name, 1.0),
                    self._decay[name],
                )
                for name in names
            ]
            sums = self._rules[names[0]].update_whole(wholes)
            if is_uncounted:
                continue
            total = sum(whole.live.numel() for whole in wholes)
            self._tally.add(torch.cat([sums, sums.new_full((1,), total)]))

    def _update_in_rounds(
        self, rule: RoundRule, gradients: MutableMapping[str, Tensor], lr: float, scale: float
    ) -> None:
        for number, names in enumerate(rule.rounds):
            pieces = [self._piece(name, ..., gradients.pop(name), lr, scale) for name in names if name in gradients]
            if pieces:
                self._apply(pieces, partial(rule.update_round, number))
            else:
                rule.update_round(number, [])

    def _in_rows(self, name: str) -> Iterator[Rows]:
        """Yield the rows of a large parameter in groups, if the rule allows it; otherwise all of it."""
        live = self._parameters[name]
        if live.numel() <= CHUNK or not self._rules[name].by_rows:
            yield ...
            return
        rows = max(1, CHUNK // live[0].numel())
        for start in range(0, len(live), rows):
            yield slice(start, min(start + rows, len(live)))

    def _piece(self, name: str, rows: Rows, gradient: Tensor, lr: float, scale: float) -> _ParameterSlice:
        live, state = self._parameters[name], self._state[name]
        if rows is not ...:
            state = {key: value[rows] for key, value in state.items()}
        fp32 = gradient if gradient.dtype == torch.float32 else gradient.float()
        value = self._master.read(name, live, rows)
        lr *= self._lr_scale.get(name, 1.0)
        slot = Slot(name, value, fp32.mul_(scale), state, self._steps[name], lr, self._decay[name])
        return _ParameterSlice(slot, live.detach()[rows], rows)

    def _apply(self, pieces: list[_ParameterSlice], update: Callable[[Sequence[Slot]], None] | None = None) -> None:
        """Update pieces by `update`, or else each by its rule; then store them and sum the effect."""
        slots = [piece.slot for piece in pieces]
        is_counted = slots[0].name not in self._uncounted
        look = _Look(pieces, self._shapes if self._by_row else None) if is_counted else None
        if update is None:
            self._update_by_rule(slots)
        else:
            update(slots)
        for piece in pieces:
            name = piece.slot.name
            self._master.write(name, self._parameters[name], piece.rows, piece.slot.value, piece.slot.step)
        if look is None:
            return
        stored = [self._master.read(piece.slot.name, self._parameters[piece.slot.name], piece.rows) for piece in pieces]
        self._tally.add(look.after(stored))

    def _update_by_rule(self, slots: Sequence[Slot]) -> None:
        by_rule: defaultdict[int, list[Slot]] = defaultdict(list)
        for slot in slots:
            by_rule[id(self._rules[slot.name])].append(slot)
        for alike in by_rule.values():
            self._rules[alike[0].name].update(alike)


@dataclass(slots=True)
class _ParameterSlice:
    slot: Slot
    live: Tensor
    rows: Rows


class _Look:
    """Measures an update's effect: copies values before it, compares after it, sums on the device."""

    def __init__(self, pieces: Sequence[_ParameterSlice], by_row_of: Mapping[str, Sequence[int]] | None) -> None:
        """`by_row_of`: shapes of whole parameters, whose rows are summed first."""
        self._pieces, self._by_row_of = pieces, by_row_of
        self._narrow = any(piece.live.dtype != torch.float32 for piece in pieces)
        self._old = _flat([piece.slot.value for piece in pieces]).clone()
        self._had_gradient = _flat([piece.slot.grad for piece in pieces]) != 0  # before the rule overwrites it
        self._served = _flat([piece.live for piece in pieces]).clone() if self._narrow else self._old

    def after(self, stored: Sequence[Tensor]) -> Tensor:
        wanted, kept = _flat([piece.slot.value for piece in self._pieces]), _flat(stored)
        changed = kept != self._old
        update = wanted - self._old
        energy = torch.linalg.vector_norm(update).square()
        # The part of the update that was lost. Float32 weights are the wanted values themselves.
        lost = torch.dot(wanted - kept, update) if self._narrow else torch.zeros_like(energy)
        serves = _flat([piece.live for piece in self._pieces]) if self._narrow else kept
        counts = [self._had_gradient, self._had_gradient & changed, serves != self._served, changed]
        if self._by_row_of is not None:
            energy, lost = self._sums_by_row(update, wanted - kept, self._by_row_of)
        total = torch.full_like(energy, changed.numel(), dtype=torch.float64)
        return torch.stack([energy.double(), lost.double(), *(mask.sum().double() for mask in counts), total])

    def _sums_by_row(
        self, update: Tensor, missed: Tensor, shapes: Mapping[str, Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        sizes = [piece.live.numel() for piece in self._pieces]
        energy = lost = update.new_zeros((), dtype=torch.float64)
        for piece, moved, gone in zip(self._pieces, update.split(sizes), missed.split(sizes), strict=True):
            numbers = numbers_a_norm(piece.slot.name, shapes[piece.slot.name])
            moved, gone = (in_blocks(each.view(piece.live.shape), numbers) for each in (moved, gone))
            energy = energy + torch.linalg.vector_norm(moved, dim=1).double().square().sum()
            lost = lost + (moved * gone).sum(1).double().sum()
        return energy, lost


class _Tally:
    """Adds up sums over a step, on the device; they are read once."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums

    def numbers(self) -> list[float]:
        return [] if self._sums is None else self._sums.tolist()


def metrics_of(sums: Sequence[float]) -> Metrics:
    """Return the metrics. `sums`: those of `Optimizer.drain_sums`, or several ranks' added up."""
    if not sums:
        return {}
    energy, lost, with_gradient, effective, served, stored, total = sums
    return {
        "update/effective_fraction": effective / with_gradient if with_gradient else 0.0,
        "update/lost_energy": lost / energy if energy else 0.0,
        "update/served_fraction": served / total,
        "update/stored_fraction": stored / total,
        "update/norm": energy**0.5,
    }


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].flatten() if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])
