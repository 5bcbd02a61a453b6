"""An optimizer of the user's own: a class with `init` and `update`, or a function `update` that keeps no state."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import OwnCodeFailed, SpecError
from tandem.io import own_code
from tandem.optim.update_rule import ByParts, Slot
from tandem.spec.optim import OwnOptimizerSpec

_INIT, _UPDATE = "init(like)", "update(value, grad, state, *, lr, step)"
_FIELD = "optimizer.kind"


class OwnRule(ByParts):
    """Calls the user's `update` for one tensor at a time: whole, unless their class says `by_rows = True`."""

    def __init__(self, name: str, init: Any, update: Any, *, by_rows: bool) -> None:
        self.by_rows = by_rows
        self._name, self._init, self._update = name, init, update

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        if self._init is None:
            return {}
        with own_code.called(_FIELD, self._name, _INIT):
            state = self._init(torch.zeros_like(like, dtype=torch.float32))
        good = isinstance(state, dict) and all(
            isinstance(key, str) and isinstance(value, Tensor) and value.dtype == torch.float32
            for key, value in state.items()  # pyright: ignore[reportUnknownVariableType]
        )
        if not good:
            raise OwnCodeFailed(
                f"{_FIELD} = '{self._name}': {_INIT} returned {state!r:.80}; return a dict of fp32 tensors, as "
                '{"momentum": torch.zeros_like(like)}'
            )
        # Ranks ask for shapes on the meta device, where there are no values; `make` has asked for some.
        if any(not value.is_meta and bool(value.any()) for value in state.values()):
            raise OwnCodeFailed(
                f"{_FIELD} = '{self._name}': {_INIT} made state that is not 0; begin with zeros (several ranks cut it "
                "into rows), and use `step`, which is 1 at the first update"
            )
        return state

    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.decay:
                slot.value.mul_(1 - slot.lr * slot.decay)
            with own_code.called(_FIELD, self._name, _UPDATE):
                self._update(slot.value, slot.grad, slot.state, lr=slot.lr, step=slot.step)
            if self._init is None and slot.state:
                raise OwnCodeFailed(
                    f"{_FIELD} = '{self._name}': a function keeps no state, and it stored {', '.join(slot.state)}; "
                    f"write a class with {_INIT} and {_UPDATE}, whose state a checkpoint has"
                )


def make(spec: OwnOptimizerSpec) -> OwnRule:
    name, found = spec.name, own_code.load(_FIELD, spec.name)
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer):
        raise SpecError(
            f"{_FIELD} = '{name}': is a torch.optim.Optimizer, which keeps parameters and state to itself; write a "
            f"class with {_INIT} and {_UPDATE} (docs/your_own.md)"
        )
    if inspect.isfunction(found):
        own_code.check_call(_FIELD, name, found, _UPDATE, "value", "grad", "state", lr=0.0, step=1, **spec.params)
        return OwnRule(name, None, lambda *a, **k: found(*a, **k, **spec.params), by_rows=False)
    made: Any = found
    if inspect.isclass(found):
        own_code.check_call(_FIELD, name, found, f"{found.__name__}(**params)", **spec.params)
        with own_code.called(_FIELD, name, f"{found.__name__}(**params)"):
            made = found(**spec.params)
    for method, call in (("init", _INIT), ("update", _UPDATE)):
        if not callable(getattr(made, method, None)):
            raise SpecError(f"{_FIELD} = '{name}'{own_code.place_of(type(made))}: has no method {call}; add it")
    own_code.check_call(_FIELD, name, made.init, _INIT, "like")
    own_code.check_call(_FIELD, name, made.update, _UPDATE, "value", "grad", "state", lr=0.0, step=1)
    rule = OwnRule(name, made.init, made.update, by_rows=bool(getattr(made, "by_rows", False)))
    rule.init("probe", torch.zeros(2, 3))
    return rule
