"""`tandem env check`: how often a model already earns a reward, before it is trained.

RL strengthens what a model sometimes does. If no sibling earns more than another, there is nothing to strengthen; then
the likely reason is named instead.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.build import training
from tandem.build.judges import judge_model
from tandem.errors import EpisodeFailed, SpecError
from tandem.obs.claims import answers, figure_of
from tandem.recipes.packages import ready_packages
from tandem.recipes.serve import find_model, load_model
from tandem.rollout.episode import Setting, play
from tandem.rollout.reward_reasons import NoReward, likely_reason
from tandem.runs.verdict import t_quantile
from tandem.spec.engine import HfEngineSpec
from tandem.spec.environment import EnvironmentSpec
from tandem.spec.load import AnySpec
from tandem.spec.model import PathModel
from tandem.spec.run import RlSpec
from tandem.types import Measure, Sampling, Task, Trajectory

_LEAST_SIGNAL = 0.1  # share of groups with different rewards; with fewer most of a step is computed for nothing
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class BaseRate:
    """What a model earns on an environment's tasks without training."""

    model: str
    environment: str
    measure: Measure
    mean: float
    interval: tuple[float, float]
    """95 %, over the choice of tasks."""
    tasks: int
    group_size: int
    answers: int
    """Those that were played to their end."""
    failed: int
    signal: float
    """Share of groups whose siblings earned different rewards."""
    truncated: float
    """Share of answers that reached max_tokens."""
    tokens: float
    """Tokens of an answer, on average."""
    seconds: float
    reason: NoReward | None
    """Why all answers earned the same, if they did."""
    shown: str
    """Three answers with their rewards."""

    @property
    def passed(self) -> bool:
        """Return whether RL has something to learn from: siblings of a tenth of the groups earned different rewards."""
        return self.signal >= _LEAST_SIGNAL

    def row(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "model": self.model, "environment": self.environment, "metric": self.measure, self.measure: self.mean,
            "interval": list(self.interval), "confidence": _CONFIDENCE, "tasks": self.tasks,
            "group_size": self.group_size, "answers": self.answers, "failed": self.failed,
            "groups_with_signal": self.signal, "truncated": self.truncated, "tokens_per_answer": self.tokens,
            "seconds": self.seconds, "passed": self.passed, "likely": self.reason.kind if self.reason else "",
            "why": self.reason.text if self.reason else "",
        }  # fmt: skip

    def text(self) -> str:
        """Return the result as text."""
        low, high = (figure_of(self.measure, bound) for bound in self.interval)
        failed = f", {self.failed} episodes failed" if self.failed else ""
        rate = self.answers / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.model} on {self.environment}: {self.measure} {figure_of(self.measure, self.mean)} "
            f"(95 % interval {low} to {high}), {self.tasks} tasks x {self.group_size} answers{failed}",
            f"groups with a signal, whose answers earned different rewards: {self.signal:.0%}",
            f"{self.tokens:.0f} tokens an answer, {self.truncated:.0%} cut off; {self.seconds:.1f} s, "
            f"{rate:.1f} answers/s",
            *([f"some answers:\n{self.shown}"] if self.shown else []),
        ]
        if self.passed:
            return "\n".join([*lines, "There is something to learn from."])
        why = f" Likely {self.reason.kind}: {self.reason.text}." if self.reason else ""
        if not why and self.measure == "accuracy" and self.mean > 0.5:
            why = " The tasks are nearly solved; take harder ones."
        elif not why:
            why = " Take easier tasks, larger groups (--answers) or a warm-up ([warmup])."
        return "\n".join([*lines, f"Too few groups have a signal (at least {_LEAST_SIGNAL:.0%}).{why}"])


def measure_base_rate(
    source: AnySpec,
    model: str | Path = "",
    *,
    params: Mapping[str, Any] | None = None,
    tasks: int = 32,
    group_size: int = 8,
    max_tokens: int = 0,
    temperature: float = 0.0,
) -> BaseRate:
    """Play `tasks` training tasks `group_size` times each, without training. `source`: a spec, or the name of an
    environment, with its `params`. `model`: a directory or hub id; left out, that of the spec. `max_tokens` and
    `temperature` of 0 take the spec's, or 256 and 1."""
    spec, environment_spec = training.read_environment(source, params)
    path = str(model) or _model_of(spec)
    stage = spec.train if spec else None
    sampling = Sampling(
        max_tokens=max_tokens or (stage.max_tokens if stage else 256),
        temperature=temperature or (stage.temperature if stage else 1.0),
        top_p=stage.top_p if stage else 1.0,
    )
    with ready_packages(environment_spec) as packages:
        environment = training.environment(environment_spec, packages and packages.installed)
    try:
        every = list(environment.tasks("train"))
        chosen = random.Random("base rate").sample(every, min(tasks, len(every)))
        groups, failures, seconds = _play(path, spec, environment, environment_spec, chosen, group_size, sampling)
    finally:
        training.close(environment)
    return _rated(path, environment_spec.name, chosen, group_size, groups, failures, seconds, sampling.max_tokens)


def _model_of(spec: RlSpec | None) -> str:
    if spec is None:
        raise SpecError("--model: is missing; name a model's directory or hub id, or give a spec that has one")
    if not isinstance(spec.model, PathModel):
        raise SpecError(
            f"model.preset = '{spec.model.preset}': such a model knows nothing before its warm-up; name one by --model"
        )
    return spec.model.path


def _play(
    path: str,
    spec: RlSpec | None,
    environment: Any,
    environment_spec: EnvironmentSpec,
    tasks: Sequence[Task],
    group_size: int,
    sampling: Sampling,
) -> tuple[list[list[Trajectory]], list[EpisodeFailed], float]:
    """Return the groups, the failures of episodes, and the seconds that playing took."""
    found, _, version = find_model(path, field="--model")
    model, engine = load_model(
        found, version, HfEngineSpec(), thinking=spec.model.thinking if spec else False, inline=True
    )
    setting = Setting(
        environment,
        engine,
        model.renderer,
        replace(sampling, max_tokens=min(sampling.max_tokens, model.context)),
        model.context,
        spec.engine.deadline_s if spec else HfEngineSpec().deadline_s,
        environment_spec.episode_timeout_s,
        judge=judge_model(environment_spec.judge, engine, model.renderer, model.context),
        retries=1 if environment_spec.workers else 0,
    )
    failures: list[EpisodeFailed] = []

    async def one(task: Task, seed: int) -> Trajectory | None:
        try:
            return await play(setting, *setting.opened(task), seed)
        except EpisodeFailed as failure:
            failures.append(failure)
            return None

    async def all_of() -> list[list[Trajectory | None]]:
        try:
            return await asyncio.gather(
                *(
                    asyncio.gather(*(one(task, (number * 4096 + sibling) * 1024) for sibling in range(group_size)))
                    for number, task in enumerate(tasks)
                )
            )
        finally:
            await engine.close()

    started = time.perf_counter()
    played = asyncio.run(all_of())
    groups = [[each for each in group if each is not None] for group in played]
    return groups, failures, time.perf_counter() - started


def _rated(
    path: str,
    environment: str,
    tasks: Sequence[Task],
    group_size: int,
    groups: Sequence[Sequence[Trajectory]],
    failures: Sequence[EpisodeFailed],
    seconds: float,
    max_tokens: int,
) -> BaseRate:
    played = [each for group in groups for each in group]
    is_accuracy = bool(played) and all(0 <= each.metrics.get("correct", each.reward) <= 1 for each in played)
    measure: Measure = "accuracy" if is_accuracy else "reward"

    def score(each: Trajectory) -> float:
        return each.metrics.get("correct", each.reward) if is_accuracy else each.reward

    means = [statistics.fmean(map(score, group)) for group in groups if group]
    with_signal = sum(len({each.reward for each in group}) > 1 for group in groups)
    pairs = [(task, each) for task, group in zip(tasks, groups, strict=True) for each in group]
    return BaseRate(
        Path(path).name or path,
        environment,
        measure,
        statistics.fmean(means) if means else 0.0,
        _interval(means, within_one=is_accuracy),
        len(tasks),
        group_size,
        len(played),
        len(failures),
        with_signal / len(groups) if groups else 0.0,
        statistics.fmean(each.status == "truncated" for each in played) if played else 0.0,
        statistics.fmean(each.num_trained for each in played) if played else 0.0,
        seconds,
        likely_reason(pairs, failures if len(failures) > len(played) else (), max_tokens=max_tokens),
        answers(played),
    )


def _interval(means: Sequence[float], *, within_one: bool) -> tuple[float, float]:
    """Return Student's interval of the tasks' means. Equal means have no spread; then an accuracy is bounded by what so
    many tasks could have missed."""
    count = len(means)
    if not count:
        return (0.0, 0.0)
    mean = statistics.fmean(means)
    if len(set(means)) == 1:
        missed = 1 - ((1 - _CONFIDENCE) / 2) ** (1 / count) if within_one else 0.0
        return max(mean - missed, 0.0) if within_one else mean, min(mean + missed, 1.0) if within_one else mean
    half = t_quantile((1 + _CONFIDENCE) / 2, count - 1) * statistics.stdev(means) / math.sqrt(count)
    low, high = mean - half, mean + half
    return (max(low, 0.0), min(high, 1.0)) if within_one else (low, high)
