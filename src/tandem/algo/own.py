"""An algorithm of the user's own: each of its three functions may come from a file; the others are those of dr_grpo
in RL, of SFT or of DPO on recorded rows.

What a user's function returns is checked here, where the error can name it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from tandem.errors import OwnCodeFailed, SpecError
from tandem.io import own_code
from tandem.protocols import Algorithm, Credit
from tandem.spec.own import OwnAlgorithmSpec
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals

_LOSS, _CREDIT, _KEEP = "loss(scored, micro, totals)", "credit(groups)", "keep(group)"


def make(spec: OwnAlgorithmSpec, plain: Algorithm) -> Algorithm:
    """Make the algorithm. `plain`: whose functions stand in for those that the spec does not name."""
    main = own_code.load("algorithm.name", spec.name) if spec.name else plain
    if isinstance(main, Algorithm):
        return _from_object(spec, main)
    used = set[str]()
    loss = _function(spec, "name", main, _LOSS, used)
    credit = keep = None
    if spec.credit:
        credit = _function(spec, "credit", own_code.load("algorithm.credit", spec.credit), _CREDIT, used)
    if spec.keep:
        keep = _function(spec, "keep", own_code.load("algorithm.keep", spec.keep), _KEEP, used)
    _refuse_unused(spec, used)
    made = dataclasses.replace(plain, name=own_code.short(spec.name or spec.credit or spec.keep), loss=loss)
    made = dataclasses.replace(made, needs_reference=spec.reference)
    made = dataclasses.replace(made, credit=credit) if credit is not None else made
    return _checked(spec, dataclasses.replace(made, keep=keep) if keep is not None else made, whole=False)


def _from_object(spec: OwnAlgorithmSpec, main: Algorithm) -> Algorithm:
    """Return an Algorithm as it is, or with functions of files in the place of its own."""
    if spec.name and (spec.params or spec.reference):
        key = "params" if spec.params else "reference"
        raise SpecError(
            f"algorithm.{key} = {getattr(spec, key)}: algorithm.name = '{spec.name}' is a whole Algorithm, which sets "
            f"it itself; leave {key} out"
        )
    used = set[str]()
    changes: dict[str, Any] = {}
    for field, call in (("credit", _CREDIT), ("keep", _KEEP)):
        if name := getattr(spec, field):
            changes[field] = _function(spec, field, own_code.load(f"algorithm.{field}", name), call, used)
    _refuse_unused(spec, used)
    if not spec.name:
        changes |= {"name": own_code.short(spec.credit or spec.keep), "needs_reference": spec.reference}
    return _checked(spec, dataclasses.replace(main, **changes), whole=bool(spec.name))


def _function(spec: OwnAlgorithmSpec, field: str, function: Any, call: str, used: set[str]) -> Any:
    """Return the function with those of `params` that it takes, after checking that it can be called."""
    where, name = f"algorithm.{field}", getattr(spec, field)
    arguments = call[call.index("(") + 1 : -1].split(", ")
    if not callable(function):
        own_code.check_call(where, name, function, call)
    taken = inspect.signature(function).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    params = {key: value for key, value in spec.params.items() if any_name or key in taken}
    used.update(params)
    own_code.check_call(where, name, function, call, *arguments, **params)
    return (lambda *values: function(*values, **params)) if params else function


def _refuse_unused(spec: OwnAlgorithmSpec, used: set[str]) -> None:
    if unused := [key for key in spec.params if key not in used]:
        names = ", ".join(filter(None, (spec.name, spec.credit, spec.keep)))
        raise SpecError(f"algorithm.params.{unused[0]} = {spec.params[unused[0]]!r}: no function of {names} takes it")


def _checked(spec: OwnAlgorithmSpec, made: Algorithm, *, whole: bool) -> Algorithm:
    """Return the algorithm with every call of a user's function wrapped; the plain ones stay as they are. `whole`: all
    three are the user's."""

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        with own_code.called("algorithm.name", spec.name, _LOSS):
            found: Any = made.loss(scored, micro, totals)
        return _as_loss(spec.name, found)

    def credit(groups: Sequence[Group]) -> list[Credit]:
        name = spec.credit or spec.name
        with own_code.called("algorithm.credit", name, _CREDIT):
            found: Any = made.credit(groups)
        return _as_credit(name, groups, found)

    def keep(group: Group) -> bool:
        with own_code.called("algorithm.keep", spec.keep or spec.name, _KEEP):
            return bool(made.keep(group))

    return dataclasses.replace(
        made,
        loss=loss if spec.name else made.loss,
        credit=credit if spec.credit or whole else made.credit,
        keep=keep if spec.keep or whole else made.keep,
    )


def _as_loss(name: str, found: Any) -> tuple[Tensor, TokenSums]:
    loss, metrics = found if isinstance(found, tuple) and len(cast("tuple[Any, ...]", found)) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(cast(Any, loss)).__name__
        raise _returned(name, _LOSS, what, "return one number (a tensor), alone or with a dict of metrics")
    if torch.is_grad_enabled() and not loss.requires_grad:  # held-out rows are scored without one
        raise _returned(name, _LOSS, "a loss without a gradient", "compute it from scored.logprobs_N")
    if not isinstance(metrics, Mapping):
        what = f"metrics of type {type(metrics).__name__}"
        raise _returned(name, _LOSS, what, 'return a dict of sums over the micro-batch\'s tokens, as {"loss/x": sum}')
    sums: dict[str, float | Tensor] = {}
    for key, value in cast("Mapping[Any, Any]", metrics).items():
        one = value if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() else None
        if not (one is not None or isinstance(value, Real)) or not isinstance(key, str) or "/" not in key:
            way_out = 'name it as in "loss/x"; its value is a number'
            raise _returned(name, _LOSS, f"the metric {key!r}: {value!r:.60}", way_out)
        sums[key] = float(value) if one is None else one.reshape(()).to(loss.device)
    return loss.reshape(()), sums


def _as_credit(name: str, groups: Sequence[Group], found: Any) -> list[Credit]:
    """Spread one number of a trajectory over its trained tokens; take one number a token as it is."""
    way_out = "return a list a group, with an entry a trajectory: a number, or a list of one a trained token"
    listed = _listed(found)
    if listed is None or len(listed) != len(groups):
        raise _returned(name, _CREDIT, _sized(found), f"there are {len(groups)} groups; {way_out}")
    credits: list[Credit] = []
    for group, of_group in zip(groups, map(_listed, listed), strict=True):
        if of_group is None or len(of_group) != len(group):
            raise _returned(name, _CREDIT, f"{_sized(of_group)} for a group of {len(group)}", way_out)
        credits.append([])
        for trajectory, value in zip(group, of_group, strict=True):
            tokens = [value] * trajectory.num_trained if isinstance(value, Real) else _listed(value)
            if tokens is None or len(tokens) != trajectory.num_trained:
                what = f"{_sized(value)} for a trajectory with {trajectory.num_trained} trained tokens"
                raise _returned(name, _CREDIT, what, way_out)
            credits[-1].append([float(number) for number in tokens])
    return credits


def _listed(value: Any) -> list[Any] | None:
    """Return a list, tuple, array or tensor as a list; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(cast("Sequence[Any]", value)) if isinstance(value, Sequence) and not isinstance(value, str) else None


def _sized(value: Any) -> str:
    listed = _listed(value)
    return type(value).__name__ if listed is None else f"{len(listed)} entries"


def _returned(name: str, call: str, what: str, way_out: str) -> OwnCodeFailed:
    return OwnCodeFailed(f"algorithm = '{name}': {call} returned {what}; {way_out}")
