"""`tandem eval`: evaluate any model on held-out tasks of an environment, by the same rules as inside a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.build import training
from tandem.build.judges import judge_model
from tandem.errors import SpecError
from tandem.obs.claims import change_of, figure_of
from tandem.recipes.packages import ready_packages
from tandem.recipes.serve import find_model, load_model
from tandem.rollout.episode import Setting
from tandem.rollout.evaluate import Evaluation, evaluate, held_out
from tandem.runs.eval_files import StoredEval, played_as, read_evals, store_eval
from tandem.runs.verdict import Verdict, judge
from tandem.spec.engine import HfEngineSpec
from tandem.spec.load import AnySpec, as_spec, load_spec
from tandem.spec.run import RlSpec, RunSpec
from tandem.types import Measure, Sampling, Task


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The evaluation of a model, and the verdict if it was compared with another one."""

    found: StoredEval
    path: Path
    """The file of the stored evaluation."""
    against: StoredEval | None = None
    verdict: Verdict | None = None
    answers: str = ""
    """Some answers, if no answer scored."""

    def row(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        row: dict[str, Any] = {
            "version": self.found.version, "metric": self.found.metric, self.found.metric: self.found.mean,
            "tasks": len(self.found.tasks), "failed": self.found.failed, "stored": str(self.path),
        }  # fmt: skip
        if self.verdict is not None and self.against is not None:
            row |= {
                "against": {
                    "version": self.against.version, self.against.metric: self.against.mean, "when": self.against.when,
                },
            }  # fmt: skip
            row |= {"verdict": self.verdict.verdict, "paired": asdict(self.verdict)}
        return row

    def text(self) -> str:
        """Return the result as text."""
        found, measure = self.found, self.found.metric
        what = "of" if measure == "accuracy" else f"{measure} a task, mean over"
        lines = [f"{figure_of(measure, found.mean)} {what} {len(found.tasks)} held-out tasks (version {found.version})"]
        if self.verdict is not None and self.against is not None:
            low, high = self.verdict.interval
            why = f": {self.verdict.why}" if self.verdict.why else ""
            lines.append(
                f"{self.verdict.verdict}{why}: {change_of(measure, self.verdict.difference)} "
                f"[{change_of(measure, low)}, {change_of(measure, high)}] against "
                f"{figure_of(measure, self.against.mean)} ({self.against.when}), the same tasks in pairs"
            )
        return "\n".join([*lines, *filter(None, [self.answers]), f"stored {self.path}"])


def evaluate_model(
    source: str | Path, spec: AnySpec | None = None, *, base: str | Path = "", directory: str | Path | None = None
) -> EvaluatedModel:
    """Evaluate `source` and compare it with `base`; each is a run, a model directory or a hub id.

    `spec` names the environment and tasks; the default is the run's own. The result is stored with those of the run, or
    in `directory`. Without `base`, a run is compared with its earliest evaluation on the same tasks, if there is one.
    """
    its_own = spec is None
    spec = as_spec(spec) if spec is not None else _spec_of(source)
    if not isinstance(spec, RlSpec):
        raise SpecError(f"recipe = '{spec.recipe}': evaluations need an environment; give a spec with recipe = 'rl'")
    is_run = (Path(source) / "status.json").exists()
    target = Path(directory or (source if is_run else Path(".tandem") / "evals" / Path(source).name))
    with ready_packages(spec, Path(source) if is_run and its_own else None) as packages:
        environment = training.environment(training.its_spec(spec), packages and packages.installed)

    async def play() -> tuple[list[Task], Evaluation | None, Evaluation]:
        """Play both in one event loop, to which the environment's workers belong."""
        try:
            tasks = held_out(environment.tasks("eval"), spec.eval.tasks, spec.seed)
            first = await _play(base, spec, environment, tasks, None) if base else None
            return tasks, first, await _play(source, spec, environment, tasks, first.measure if first else None)
        finally:
            training.close(environment)

    tasks, of_base, played = asyncio.run(play())
    against = _stored(of_base, spec, tasks, 0, f"base {base}") if of_base else None
    version = find_model(source)[2]
    found = _stored(played, spec, tasks, version, "eval")
    if against is None and is_run:
        against = next((e for e in read_evals(Path(source)) if e.pairs_with(found) and e.version < version), None)
    path = store_eval(target, found)
    if against is None:
        return EvaluatedModel(found, path, answers=played.all_equal)
    verdict = judge(against.scores, found.scores, confidence=spec.eval.confidence, measure=found.metric, seed=spec.seed)
    return EvaluatedModel(found, path, against, verdict, played.all_equal)


def _stored(found: Evaluation, spec: RlSpec, tasks: Sequence[Task], version: int, when: str) -> StoredEval:
    return StoredEval(
        version, when, found.measure, played_as(spec), [task.id for task in tasks], found.scores, found.failed
    )


async def _play(
    source: str | Path, spec: RlSpec, environment: Any, tasks: Sequence[Task], measure: Measure | None
) -> Evaluation:
    """Load a model, let it play the tasks greedily, and return the scores."""
    path, _, version = find_model(source)
    environment_spec = training.its_spec(spec)
    load = partial(load_model, path, version, HfEngineSpec(), thinking=spec.model.thinking, inline=True)
    model, engine = await asyncio.to_thread(load)  # it runs an event loop of its own
    setting = Setting(
        environment,
        engine,
        model.renderer,
        Sampling(max_tokens=spec.train.max_tokens, temperature=0.0),
        model.context,
        spec.engine.deadline_s,
        environment_spec.episode_timeout_s,
        0.0,
        judge_model(environment_spec.judge, engine, model.renderer, model.context),
        retries=1 if environment_spec.workers else 0,
    )

    try:
        max_tokens = spec.eval.max_tokens or spec.train.max_tokens
        share = environment_spec.max_failed_share
        return await evaluate(setting, tasks, max_tokens, max_failed_share=share, measure=measure)
    finally:
        await engine.close()


def _spec_of(source: str | Path) -> RunSpec:
    path = Path(source) / "spec.toml"
    if not path.exists():
        raise SpecError(f"{source}: is not a run, so it has no spec of its own; give one with --spec")
    return load_spec(path)
