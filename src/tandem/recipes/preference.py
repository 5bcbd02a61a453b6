"""The rows of the preference recipe: pairs of answers (DPO, ORPO) or labelled ones (KTO), as groups."""

from __future__ import annotations

from tandem.build import built_model, training
from tandem.data.preference_pairs import Pair
from tandem.data.rated_answers import Rated
from tandem.errors import DataError, ImageError, TemplateError
from tandem.recipes.supervised_steps import longest_of, marked, reported
from tandem.rollout.recorded_producer import record_answer, record_pair, with_mismatched
from tandem.runs.run import Run
from tandem.types import Group, Trajectory


def checked_pairs(
    model: built_model.BuiltModel, data: training.FileOrDataset, run: Run
) -> tuple[list[Group], list[Group]]:
    """Load pairs as groups of two, training and held-out ones; report which rows were dropped and why."""
    longest = longest_of(model, data)

    def recorded(pair: Pair) -> Group:
        name = f"{pair.source}:{pair.row}"
        return record_pair(model.renderer, pair.prompt, pair.chosen, pair.rejected, name)

    def unusable(pair: Pair) -> str:
        try:
            chosen, rejected = recorded(pair)
        except (TemplateError, ImageError) as error:
            return str(error)
        if chosen.ids == rejected.ids:
            return "chosen and rejected are the same tokens"
        too_long = [name for name, each in (("chosen", chosen), ("rejected", rejected)) if len(each.ids) > longest]
        return f"{' and '.join(too_long)}: longer than {longest} tokens" if too_long else ""

    sees = model.renderer.images is not None
    split = reported(training.pairs(data, "data", sees=sees).without(unusable), "pair", run, "data")
    train, held_out = ([recorded(pair) for pair in rows] for rows in (split.train, split.held_out))
    run.view.say("   one pair; the tokens in [[ ]] are trained, in the first up and in the second down:")
    for trajectory in train[0]:
        run.view.say("   " + marked(model, trajectory))
    return train, held_out


def checked_answers(
    model: built_model.BuiltModel, data: training.FileOrDataset, run: Run
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
        except (TemplateError, ImageError) as error:
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
