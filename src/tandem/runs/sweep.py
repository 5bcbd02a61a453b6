"""Combine the results of a sweep: several seeds of one spec, which show the variance of training, or several values."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tandem.errors import RunError
from tandem.io.bounded_json import read_json
from tandem.obs.claims import ends, interval
from tandem.obs.readings import one_line
from tandem.obs.run_history import measure_of, number
from tandem.obs.sweep_picture import PictureRow, sweep_svg
from tandem.runs.verdict import Word, decide, t_quantile
from tandem.types import Measure


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One run of a sweep, from its status.json."""

    seed: int
    directory: str
    state: str
    before: float | None = None
    after: float | None = None
    interval: tuple[float, float] | None = None
    """Interval of after minus before, over this run's held-out tasks."""
    verdict: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    std: float | None
    """Standard deviation over seeds, with n - 1; None for a single seed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The combined result. `interval`: the t-interval of the mean difference over seeds."""

    directory: Path
    metric: Measure
    confidence: float
    seeds: Sequence[SeedResult]
    failed: int
    before: Spread | None
    after: Spread | None
    difference: Spread | None
    interval: tuple[float, float] | None
    verdict: Word
    why: str = ""
    """Why it is undecided."""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What was set; empty: the spec as it is."""
    settings: Sequence[Sweep] = ()
    """Of a sweep over values: each combination with its seeds. The numbers above are then those of the best one."""


def member_name(values: Mapping[str, Any], seed: int | None) -> str:
    """Return the name of a run's directory. `seed`: if there are several."""
    short = [setting.rpartition(".")[2] for setting in values]
    names = short if len(set(short)) == len(short) else list(values)
    parts = [f"{name}-{value}" for name, value in zip(names, values.values(), strict=True)]
    text = "_".join([*parts, *([] if seed is None else [f"seed-{seed}"])])
    clear = len(text) <= 80 and re.fullmatch(r"[A-Za-z0-9_.+-]+", text) is not None
    text = re.sub(r"[^A-Za-z0-9_.+-]+", "-", text)
    return text if clear else f"{text[:70]}-{sha256(repr((dict(values), seed)).encode()).hexdigest()[:8]}"


def label(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{setting} = {_value(value)}" for setting, value in values.items())


def read_seed(directory: Path, seed: int) -> tuple[SeedResult, Mapping[str, Any]]:
    try:
        status = read_json(directory / "status.json")
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: its status.json cannot be read: {error}") from error
    before, after = ends(status)
    result = SeedResult(
        seed, directory.name, str(status.get("state")), before, after, interval(status),
        str(status.get("verdict", "")), float(status.get("seconds", 0.0)), str(status.get("error", "")),
    )  # fmt: skip
    return result, status


def summarise(
    directory: Path,
    seeds: Sequence[SeedResult],
    statuses: Sequence[Mapping[str, Any]],
    confidence: float,
    values: Mapping[str, Any] | None = None,
) -> Sweep:
    """Combine the seeds. `statuses`: of those that succeeded; failed seeds are counted, but not in the numbers.
    `values`: what was set in all of them."""
    metric: Measure = measure_of(statuses[0]) if statuses else "accuracy"
    judged = [each for each in seeds if each.state == "succeeded" and each.difference is not None]
    differences = [each.after - each.before for each in judged if each.after is not None and each.before is not None]
    tasks = _least("tasks", statuses)
    resolution = 1 / tasks if metric == "accuracy" and tasks else 0.0  # accuracy over n tasks is a multiple of 1/n
    bounds = _interval(differences, confidence, resolution) if len(differences) > 1 else None
    word, why = ("undecided", f"{len(judged)} judged seed{'s' * (len(judged) != 1)}; an interval needs two")
    if bounds is not None:
        margin = _least("margin", statuses)
        word, why = decide(bounds, margin, tasks=int(tasks), confidence=confidence, measure=metric)
    return Sweep(
        directory=directory,
        metric=metric,
        confidence=confidence,
        seeds=list(seeds),
        failed=sum(each.state != "succeeded" for each in seeds),
        before=_spread([each.before for each in judged if each.before is not None]),
        after=_spread([each.after for each in judged if each.after is not None]),
        difference=_spread(differences),
        interval=bounds,
        verdict=word,
        why=why,
        values=values or {},
    )


def combine(directory: Path, settings: Sequence[Sweep]) -> Sweep:
    """Combine several settings into one result, with the numbers of the best. `settings`: at least one."""
    best = best_of(settings)
    return replace(
        settings[0] if best is None else best,
        directory=directory,
        seeds=[seed for setting in settings for seed in setting.seeds],
        failed=sum(setting.failed for setting in settings),
        values={} if best is None else best.values,
        settings=list(settings),
    )


def best_of(settings: Sequence[Sweep]) -> Sweep | None:
    """Return the setting with the best mean after training; None if no run has a result."""
    judged = [(each.after.mean, each) for each in settings if each.after is not None]
    if not judged:
        return None
    sign = -1 if judged[0][1].metric == "loss" else 1
    return max(judged, key=lambda pair: sign * pair[0])[1]


def picture(sweep: Sweep, title: str) -> bytes:
    """Return an SVG with a row for each setting, or for each seed where only seeds differ."""
    best = best_of(sweep.settings)
    rows = [_picture_row(label(each.values), each.seeds, is_best=each is best) for each in sweep.settings] or [
        _picture_row(f"seed {each.seed}", [each]) for each in sweep.seeds
    ]
    return sweep_svg(rows, title, sweep.metric)


def _picture_row(name: str, seeds: Sequence[SeedResult], *, is_best: bool = False) -> PictureRow:
    done = [each for each in seeds if each.state == "succeeded"]
    before, after = ([value for value in values if value is not None] for values in (
        [each.before for each in done], [each.after for each in done]
    ))  # fmt: skip
    return PictureRow(name, before, after, is_best)


def table(sweep: Sweep) -> str:
    """Return a Markdown table with a row per seed or per setting, then the conclusion."""
    if sweep.settings:
        return _table_of_settings(sweep)
    lines = [
        f"| seed | {sweep.metric} before | after | after - before | of its tasks | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for each in sweep.seeds:
        bounds = "" if each.interval is None else f"[{each.interval[0]:+.3f}, {each.interval[1]:+.3f}]"
        said = each.verdict if each.state == "succeeded" else f"{each.state}: {_one_line(each.error)}"
        cells = (str(each.seed), *map(_figure, (each.before, each.after)), _signed(each.difference), bounds, said)
        lines.append(f"| {' | '.join(cells)} |")
    spreads = (sweep.before, sweep.after, sweep.difference)
    if sweep.before and sweep.after and sweep.difference:
        means = (_figure(sweep.before.mean), _figure(sweep.after.mean), _signed(sweep.difference.mean))
        lines.append(f"| mean | {' | '.join(means)} | | |")
        deviations = (_figure(each.std if each else None) for each in spreads)
        lines.append(f"| std | {' | '.join(deviations)} | | |")
    return "\n".join([*lines, "", conclusion(sweep)]) + "\n"


def _table_of_settings(sweep: Sweep) -> str:
    settings = list(sweep.settings[0].values)
    heads = [*settings, "runs", f"{sweep.metric} before", "after", "after - before", "interval", "verdict"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    best = best_of(sweep.settings)
    for each in sweep.settings:
        alone = each.seeds[0] if len(each.seeds) == 1 else None
        bounds = each.interval if alone is None else alone.interval
        wrong = [f"{seed.state}: {_one_line(seed.error)}" for seed in each.seeds if seed.state != "succeeded"]
        verdict = "; ".join(wrong) or (each.verdict if alone is None else alone.verdict)
        cells = [
            *(_value(each.values[setting]) for setting in settings),
            str(len(each.seeds) - each.failed),
            *(_figure(spread and spread.mean) for spread in (each.before, each.after)),
            _signed(each.difference and each.difference.mean),
            "" if bounds is None else f"[{bounds[0]:+.3f}, {bounds[1]:+.3f}]",
            f"{verdict}, best" if each is best else verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", conclusion(sweep)]) + "\n"


def _conclusion_of_settings(sweep: Sweep) -> str:
    failures = f" {sweep.failed} of {len(sweep.seeds)} runs failed." if sweep.failed else ""
    if (best := best_of(sweep.settings)) is None or best.after is None:
        return f"No setting has a result.{failures}"
    change = "" if best.difference is None else f", {best.difference.mean:+.3f}"
    return (
        f"Best of {len(sweep.settings)}: {label(best.values)}: held-out {best.metric} {best.after.mean:.3f}{change}. "
        f"It was chosen by these tasks, which flatters it: run it once more with other seeds.{failures}"
    )


def conclusion(sweep: Sweep) -> str:
    if sweep.settings:
        return _conclusion_of_settings(sweep)
    judged = sum(each.state == "succeeded" and each.difference is not None for each in sweep.seeds)
    failures = f" {sweep.failed} of {len(sweep.seeds)} seeds failed." if sweep.failed else ""
    if sweep.interval is None or sweep.difference is None:
        return f"Undecided: {sweep.why}.{failures}"
    low, high = sweep.interval
    why = f": {sweep.why}" if sweep.why else ""
    return (
        f"{sweep.verdict.capitalize()}: held-out {sweep.metric} {sweep.difference.mean:+.3f} on average, "
        f"{sweep.confidence:.0%} t-interval [{low:+.3f}, {high:+.3f}] over {judged} seeds{why}.{failures}"
    )


def _interval(differences: Sequence[float], confidence: float, resolution: float) -> tuple[float, float]:
    # Accuracy is a multiple of 1/n, so two equal differences do not prove a spread of 0: rounding alone has this
    # spread.
    std = max(statistics.stdev(differences), resolution / math.sqrt(12))
    half = t_quantile((1 + confidence) / 2, len(differences) - 1) * std / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    return mean - half, mean + half


def _least(field: str, statuses: Sequence[Mapping[str, Any]]) -> float:
    """Return the least value of a number in `eval`; a run without it counts as 0."""
    return min((number(status.get("eval", {}).get(field)) or 0.0 for status in statuses), default=0.0)


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _one_line(str(value))


def _one_line(text: str) -> str:
    line = one_line(text).replace("|", "/")
    return line if len(line) <= 100 else line[:97] + "..."
