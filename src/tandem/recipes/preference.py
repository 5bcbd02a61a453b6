"""The preference recipe: train on pairs of answers (DPO, ORPO) or labelled ones (KTO), judged by the held-out loss."""

from __future__ import annotations

import statistics
from typing import Any

from tandem.build import engaged, training
from tandem.build.reference import set_reference
from tandem.data.preference_pairs import Pair
from tandem.data.rated_answers import Rated
from tandem.errors import DataError, TemplateError
from tandem.recipes.supervised_steps import (
    MORE_ROWS,
    conclude_by_loss,
    due,
    longest_of,
    marked,
    recorded_stage,
    reported,
    say_if_too_few,
)
from tandem.rollout.recorded_producer import record_answer, record_pair, with_mismatched
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.eval_files import StoredEval, store_eval
from tandem.runs.run import Run
from tandem.spec.preference import KtoSpec
from tandem.spec.run import PreferenceSpec
from tandem.types import Group, Metrics, Trajectory


async def train_preference(spec: PreferenceSpec, run: Run, checkpointer: RunCheckpointer, crew: Any = None) -> None:
    """Train as a preference spec says: evaluate, train, evaluate again, export, give the verdict."""
    stage = spec.train
    model = training.run_model(spec, crew)
    for note in engaged.options(spec, model):
        run.note_option(*note)
    for text in model.renderer.mended:
        run.warn(text)
    labelled = isinstance(spec.algorithm, KtoSpec)
    groups, held_out = (checked_answers if labelled else checked_pairs)(model, spec.data, run)
    held_out = held_out[: spec.eval.examples]
    say_if_too_few(run, len(held_out), spec.eval.confidence, MORE_ROWS)
    algorithm = training.algorithm_of(spec)
    if algorithm.needs_reference:
        set_reference(spec.algorithm, model, spec.precision)
    trainer = training.trainer(stage, model, algorithm, 0, spec.seed)
    checkpointer.load(trainer, "preference")
    examine = training.examiner(model, algorithm, stage.micro_tokens)
    run.status |= {"steps_total": stage.steps, "algorithm": spec.algorithm.kind}

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
        if not accuracies:  # a loss of the user's own says it only if it wants to
            return losses, {"eval/loss": loss}
        run.evaluated(f"accuracy_{name}", f"{label}, accuracy", statistics.fmean(accuracies))
        return losses, {"eval/loss": loss, "eval/accuracy": statistics.fmean(accuracies)}

    def evaluate_when_due(metrics: Metrics) -> None:
        if due(spec.eval.every, trainer.version, stage.steps):
            name = f"step {trainer.version}"
            metrics |= evaluate(name, name)[1]

    before, _ = evaluate("before", "before training")
    noun = "labelled answers" if labelled else "pairs"
    run.stage("preference", stage.steps, f"{len(groups)} {noun}, {len(held_out)} held out")
    await recorded_stage(
        run,
        model,
        trainer,
        stage,
        groups,
        algorithm,
        seed=spec.seed,
        deterministic=spec.deterministic,
        checkpointer=checkpointer,
        before_record=evaluate_when_due,
    )
    after, _ = evaluate("after", "after training")
    training.export(model, run.directory / "export")
    conclude_by_loss(run, before, after, spec.eval, spec.seed)


def checked_pairs(
    model: training.BuiltModel, data: training.FileOrDataset, run: Run
) -> tuple[list[Group], list[Group]]:
    """Load pairs as groups of two, training and held-out ones; report which rows were dropped and why."""
    longest = longest_of(model, data)

    def recorded(pair: Pair) -> Group:
        name = f"{pair.source}:{pair.row}"
        return record_pair(model.renderer, pair.prompt, pair.chosen, pair.rejected, name)

    def unusable(pair: Pair) -> str:
        try:
            chosen, rejected = recorded(pair)
        except TemplateError as error:
            return str(error)
        if chosen.ids == rejected.ids:
            return "chosen and rejected are the same tokens"
        too_long = [name for name, each in (("chosen", chosen), ("rejected", rejected)) if len(each.ids) > longest]
        return f"{' and '.join(too_long)}: longer than {longest} tokens" if too_long else ""

    split = reported(training.pairs(data, "data").without(unusable), "pair", run, "data")
    train, held_out = ([recorded(pair) for pair in rows] for rows in (split.train, split.held_out))
    run.view.say("   one pair; the tokens in [[ ]] are trained, in the first up and in the second down:")
    for trajectory in train[0]:
        run.view.say("   " + marked(model, trajectory))
    return train, held_out


def checked_answers(
    model: training.BuiltModel, data: training.FileOrDataset, run: Run
) -> tuple[list[Group], list[Group]]:
    """Load labelled answers as groups of two, each with a mismatched answer; report which rows were dropped and why."""
    longest = longest_of(model, data)

    def recorded(row: Rated) -> list[Trajectory]:
        name = f"{row.source}:{row.row}"
        return [
            record_answer(model.renderer, row.prompt, answer.messages, 1.0 if answer.good else -1.0, name)
            for answer in row.answers
        ]

    def unusable(row: Rated) -> str:
        try:
            too_long = any(len(each.ids) > longest for each in recorded(row))
        except TemplateError as error:
            return str(error)
        return f"longer than {longest} tokens" if too_long else ""

    split = reported(training.rated(data, "data").without(unusable), "answer", run, "data")
    train, held_out = ([each for row in rows for each in recorded(row)] for rows in (split.train, split.held_out))
    good = sum(each.reward > 0 for each in train)
    run.view.say(f"   labels: {good} good, {len(train) - good} bad; one answer, the tokens in [[ ]] are trained:")
    run.view.say("   " + marked(model, train[0]))
    if good in (0, len(train)):
        word, way_out = ("good", "recipe = 'sft' imitates them") if good else ("bad", "add good ones")
        raise DataError(f"data: all {len(train)} answers are labelled {word}, and KTO needs both labels; {way_out}")
    return with_mismatched(train, longest), with_mismatched(held_out, longest)
