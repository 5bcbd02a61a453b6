"""The SFT and the preference recipe: train on recorded data, judged by the held-out loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tandem.build import built_model, engaged, training
from tandem.build.reference import set_reference
from tandem.io.image_store import IMAGES
from tandem.protocols import Algorithm
from tandem.recipes.preference import checked_answers, checked_pairs
from tandem.recipes.supervised_steps import (
    MORE_ROWS,
    checked_rows,
    conclude_by_loss,
    due,
    recorded_stage,
    say_if_too_few,
)
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.eval_files import StoredEval, store_eval
from tandem.runs.run import Run
from tandem.spec.preference import KtoSpec
from tandem.spec.run import PreferenceSpec, SftSpec
from tandem.types import Group, Metrics

Examine = Callable[[Sequence[Group]], list[Metrics]]
"""Returns the loss of each group as `loss/total`, and more; nothing is trained."""


async def train_supervised(
    spec: SftSpec | PreferenceSpec, run: Run, checkpointer: RunCheckpointer, crew: Any = None
) -> None:
    """Train as the spec says: evaluate, train, evaluate again, export, give the verdict."""
    stage = spec.train
    model = built_model.run_model(spec, crew, run.directory / IMAGES)
    for note in engaged.options(spec, model):
        run.note_option(*note)
    model.warn(run)
    groups, held_out, noun = _rows(spec, model, run)
    held_out = held_out[: spec.eval.examples]
    say_if_too_few(run, len(held_out), spec.eval.confidence, MORE_ROWS)
    algorithm = training.algorithm_of(spec)
    if algorithm.needs_reference:
        set_reference(spec.algorithm, model, spec.precision)
    trainer = training.trainer(stage, model, algorithm, 0, spec.seed)
    checkpointer.load(trainer, spec.recipe)
    examine = _examiner(spec, model, algorithm)
    run.status["steps_total"] = stage.steps
    if isinstance(spec, PreferenceSpec):
        run.status["algorithm"] = spec.algorithm.kind

    def evaluate(name: str, label: str) -> tuple[list[float], Metrics]:
        """Return the loss of each held-out group, and the means of loss and accuracy."""
        if not held_out:
            return [], {}
        if (known := checkpointer.remembered(name)) is not None:
            return known, {}
        found = examine(held_out)
        losses = [each["loss/total"] for each in found]
        loss = statistics.fmean(losses)
        accuracies = [each["reward/accuracy"] for each in found if "reward/accuracy" in each]
        checkpointer.remember(name, losses)
        run.evaluated(name, label, loss, metric="loss")
        tasks = [group[0].task_id for group in held_out]
        store_eval(run.directory, StoredEval(trainer.version, name, "loss", spec.data.model_dump(), tasks, losses))
        if not accuracies:  # only preference has them; a loss of the user's own says them if it wants to
            return losses, {"eval/loss": loss}
        run.evaluated(f"accuracy_{name}", f"{label}, accuracy", statistics.fmean(accuracies))
        return losses, {"eval/loss": loss, "eval/accuracy": statistics.fmean(accuracies)}

    def evaluate_when_due(metrics: Metrics) -> None:
        if due(spec.eval.every, trainer.version, stage.steps):
            name = f"step {trainer.version}"
            metrics |= evaluate(name, name)[1]

    before, _ = evaluate("before", "before training")
    run.stage(spec.recipe, stage.steps, f"{len(groups)} {noun}, {len(held_out)} held out")
    await recorded_stage(
        run, model, trainer, stage, groups, algorithm, seed=spec.seed, deterministic=spec.deterministic,
        checkpointer=checkpointer, before_record=evaluate_when_due,
    )  # fmt: skip
    after, _ = evaluate("after", "after training")
    training.export(model, run.directory / "export")
    conclude_by_loss(run, before, after, spec.eval, spec.seed)


def _rows(
    spec: SftSpec | PreferenceSpec, model: built_model.BuiltModel, run: Run
) -> tuple[list[Group], list[Group], str]:
    """Return what is trained on, what is held out, and what it is called."""
    if isinstance(spec, SftSpec):
        return *checked_rows(model, spec.data, run, "data"), "conversations"
    if isinstance(spec.algorithm, KtoSpec):
        return *checked_answers(model, spec.data, run), "labelled answers"
    return *checked_pairs(model, spec.data, run), "pairs"


def _examiner(spec: SftSpec | PreferenceSpec, model: built_model.BuiltModel, algorithm: Algorithm) -> Examine:
    if isinstance(spec, PreferenceSpec):
        return training.examiner(model, algorithm, spec.train.micro_tokens)
    score = training.scorer(model, spec.train.micro_tokens)

    def mean_of_each(groups: Sequence[Group]) -> list[Metrics]:
        """Return each conversation's mean loss per trained token."""
        scored = [score(recording) for (recording,) in groups]
        return [{"loss/total": -sum(logprobs) / len(logprobs)} for logprobs in scored]

    return mean_of_each
