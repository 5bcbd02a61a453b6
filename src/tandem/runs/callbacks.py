"""A user's callbacks, called after each step with its metrics and, if they read it, its batch by token."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tandem.errors import OwnCodeFailed, SpecError
from tandem.io import own_code
from tandem.protocols import Callback, Credit, EndingCallback, StartingCallback, Stateful, Step, StepTokens
from tandem.types import Group, Metrics

_log = logging.getLogger(__name__)

_ON_STEP = "on_step(step)"


class Callbacks:
    """All callbacks of a run, in the order of the spec."""

    def __init__(self, named: Sequence[tuple[str, Callback]] = ()) -> None:
        self._named = list(named)
        self._latest: tuple[Sequence[Group], Sequence[Credit]] = ((), ())

    def __bool__(self) -> bool:
        return bool(self._named)

    def seen(self, groups: Sequence[Group], credits: Sequence[Credit]) -> None:
        """Remember the batch of the step that begins. Called only if there are callbacks."""
        self._latest = (groups, credits)

    def start(self, directory: Path, states: Mapping[str, Any]) -> None:
        """Restore what a checkpoint has of them, and tell those that ask where the run's directory is."""
        for number, (name, callback) in enumerate(self._named):
            if (state := states.get(_key(number, name))) is not None and isinstance(callback, Stateful):
                with own_code.called("callbacks", name, "restore(state)"):
                    callback.restore(state)
            if isinstance(callback, StartingCallback):
                with own_code.called("callbacks", name, "on_start(directory)"):
                    callback.on_start(directory)

    def step(self, version: int, stage: str, metrics: Metrics) -> None:
        """Call each, and add what it returns to the metrics, with the time that all of them took."""
        if not self._named:
            return
        began = time.perf_counter()
        groups, credits = self._latest
        for name, callback in self._named:
            step = Step(version, stage, MappingProxyType(metrics), lambda: tokens_of(groups, credits))
            with own_code.called("callbacks", name, _ON_STEP):
                found: Any = callback.on_step(step)
            metrics |= _checked(name, found, metrics)
        metrics["time/callbacks_s"] = time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """Return the state of those that keep one, for a checkpoint."""
        found: dict[str, Any] = {}
        for number, (name, callback) in enumerate(self._named):
            if isinstance(callback, Stateful):
                with own_code.called("callbacks", name, "state()"):
                    found[_key(number, name)] = callback.state()
        return found

    def end(self, status: Mapping[str, Any]) -> None:
        """Tell those that ask how the run ended. The run has ended: what they raise is logged."""
        for name, callback in self._named:
            if isinstance(callback, EndingCallback):
                try:
                    callback.on_end(MappingProxyType(status))
                except Exception:  # noqa: BLE001 - the result of the run stands
                    _log.exception("callbacks: %s: on_end(status) raised; the run's result is not affected", name)


def load_callbacks(names: Sequence[str]) -> Callbacks:
    """Make an instance of each class, or take an object as it is; check that it has `on_step`."""
    found: list[tuple[str, Callback]] = []
    for number, name in enumerate(names):
        where = f"callbacks[{number}]"
        loaded = own_code.load(where, name)
        value: Any = loaded
        if inspect.isclass(loaded):
            call = f"{loaded.__name__}()"
            own_code.check_call(where, name, loaded, call)
            with own_code.called(where, name, call):
                value = loaded()
        if not callable(getattr(value, "on_step", None)):
            at = own_code.place_of(type(value))
            raise SpecError(f"{where} = '{name}'{at}: has no method {_ON_STEP}; write a class that has it")
        own_code.check_call(where, name, value.on_step, _ON_STEP, "step")
        found.append((name, cast("Callback", value)))
    return Callbacks(found)


def tokens_of(groups: Sequence[Group], credits: Sequence[Credit]) -> StepTokens:
    """Lay the samples of a step out token by token."""
    import numpy as np

    def frozen(values: Any, dtype: Any) -> Any:
        made = np.asarray(values, dtype=dtype)
        made.flags.writeable = False
        return made

    samples = list(chain.from_iterable(groups))
    lengths = [len(sample.ids) for sample in samples]
    mask = np.fromiter(chain.from_iterable(sample.trained for sample in samples), np.bool_, sum(lengths))
    advantages = np.zeros(len(mask), np.float32)
    given = (_advantages(*pair) for pair in zip(samples, chain.from_iterable(credits), strict=True))
    advantages[mask] = list(chain.from_iterable(given))
    group_of = [number for number, group in enumerate(groups) for _ in group]
    return StepTokens(
        ids_T=frozen(list(chain.from_iterable(sample.ids for sample in samples)), np.int64),
        mask_T=frozen(mask, np.bool_),
        logprobs_T=frozen(list(chain.from_iterable(sample.logprobs for sample in samples)), np.float32),
        versions_T=frozen(list(chain.from_iterable(sample.versions for sample in samples)), np.int64),
        advantages_T=frozen(advantages, np.float32),
        sample_T=frozen(np.repeat(np.arange(len(samples)), lengths), np.int64),
        rewards_S=frozen([sample.reward for sample in samples], np.float64),
        group_S=frozen(group_of, np.int64),
        task_ids=tuple(sample.task_id for sample in samples),
    )


def _advantages(sample: Any, credit: Sequence[float]) -> Sequence[float]:
    """Return those of the environment if it gave any, as the trainer does; 0 for a sample that is left out."""
    if credit and sample.advantages:
        return [value for value, trained in zip(sample.advantages, sample.trained, strict=True) if trained]
    return credit or [0.0] * sample.num_trained


def _key(number: int, name: str) -> str:
    return f"{number}:{own_code.short(name)}"


def _checked(name: str, found: Any, metrics: Metrics) -> Metrics:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _returned(name, type(found).__name__, "return None, or a dict of numbers")
    numbers: Metrics = {}
    for key, value in cast("Mapping[Any, Any]", found).items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(key, str) or "/" not in key or not isinstance(value, Real):
            raise _returned(name, f"{key!r}: {value!r:.60}", 'name a metric as in "mine/length"; its value is a number')
        if key in metrics:
            raise _returned(name, f"'{key}'", "the run has a metric of this name; choose another")
        numbers[key] = float(value)
    return numbers


def _returned(name: str, what: str, way_out: str) -> OwnCodeFailed:
    return OwnCodeFailed(f"callbacks = '{name}': {_ON_STEP} returned {what}; {way_out}")
