"""`[sweep]`: the values and seeds that `tandem sweep` trains a spec with."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, field_validator

from tandem.spec.base import Spec

MOST_SETTINGS = 1000
_RANGE = re.compile(r"(?P<low>[-+.\w]+?)\.\.(?P<high>[-+.\w]+)")


def _flat(raw: Any) -> Any:
    """Turn nested tables into one, with names such as "train.lr"."""

    def walk(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            if isinstance(value, Mapping):
                yield from walk(cast("Mapping[str, Any]", value), f"{path}{name}.")
            else:
                yield f"{path}{name}", value

    return dict(walk(cast("Mapping[str, Any]", raw), "")) if isinstance(raw, Mapping) else raw


class SweepSpec(Spec):
    """Several runs of one spec: each combination of values, with each seed."""

    over: Annotated[dict[str, Any], BeforeValidator(_flat)] = Field(default_factory=dict)
    """For each setting its values, as in `over.train.lr = [1e-5, 3e-5]`; with `random` also a range: "1e-6..1e-4"."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(default=(), strict=False)
    """Seeds of each combination; empty: the spec's own seed."""
    random: int = Field(default=0, ge=0, le=MOST_SETTINGS)
    """Number of combinations that are drawn at random, the same ones each time. 0: all combinations (a grid)."""

    @field_validator("over")
    @classmethod
    def _are_values(cls, over: dict[str, Any]) -> dict[str, Any]:
        for setting, values in over.items():
            if setting == "seed" or setting.split(".")[0] == "sweep":
                raise ValueError(f"{setting}: cannot be varied here; several seeds are sweep.seeds")
            if isinstance(values, str):
                bounds(setting, values)
            elif not isinstance(values, list | tuple) or not values:
                raise ValueError(f"{setting} = {values!r}: give a list of values, or a range such as '1e-6..1e-4'")
            elif len({repr(value) for value in cast("list[Any]", values)}) < len(cast("list[Any]", values)):
                raise ValueError(f"{setting} = {values!r}: a value is given twice; leave one of them out")
        return over


def bounds(setting: str, text: str) -> tuple[float, float]:
    """Return the two ends of a range, as whole numbers if both are written so."""
    found = _RANGE.fullmatch(text)
    try:
        assert found is not None
        low, high = (int(end) if re.fullmatch(r"[-+]?\d+", end) else float(end) for end in found.groups())
        assert -math.inf < low < high < math.inf
    except (AssertionError, ValueError):
        raise ValueError(f"{setting} = '{text}': write a range as low..high, as in '1e-6..1e-4' or '4..64'") from None
    return low, high


def combinations(sweep: SweepSpec, seed: int) -> list[dict[str, Any]]:
    """Return the values of each setting, for each combination; one without values if nothing is varied. ValueError if
    there are too many, or if a grid has a range. `seed`: of the draws."""
    ranges = [setting for setting, values in sweep.over.items() if isinstance(values, str)]
    if sweep.random:
        return _drawn(sweep, random.Random(seed))
    if ranges:
        raise ValueError(
            f"{ranges[0]} = '{sweep.over[ranges[0]]}': a range is drawn from; set random to a number of draws"
        )
    if (count := math.prod(map(len, sweep.over.values()))) > MOST_SETTINGS:
        raise ValueError(f"{count} combinations: {MOST_SETTINGS} at most; set random to draw some of them")
    return [dict(zip(sweep.over, values, strict=True)) for values in itertools.product(*sweep.over.values())]


def _drawn(sweep: SweepSpec, rng: random.Random) -> list[dict[str, Any]]:
    """Draw different combinations. More draws begin with the same ones."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(100 * sweep.random):
        drawn = {setting: _draw(setting, values, rng) for setting, values in sweep.over.items()}
        found.setdefault(repr(drawn), drawn)
        if len(found) == sweep.random:
            break
    return list(found.values())


def _draw(setting: str, values: str | Sequence[Any], rng: random.Random) -> Any:
    """Draw one value. Of a range: a whole number, or a number whose logarithm is uniform if both ends are positive."""
    if not isinstance(values, str):
        return rng.choice(values)
    low, high = bounds(setting, values)
    if isinstance(low, int) and isinstance(high, int):
        return rng.randint(low, high)
    drawn = math.exp(rng.uniform(math.log(low), math.log(high))) if low > 0 else rng.uniform(low, high)
    return float(f"{drawn:.2e}")
