"""Supervised steps on recorded data: the warm-up of an RL run, and all steps of an SFT or preference run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from tandem.build import built_model, run_engines, training
from tandem.build import groups as build_groups
from tandem.data.conversation import Conversation
from tandem.data.load import DataRow, DataSplit, load_rows
from tandem.errors import DataError, ImageError, TemplateError
from tandem.io.image_parts import has_images, interned
from tandem.io.image_store import IMAGES, ImageStore
from tandem.loop import run_loop
from tandem.protocols import Algorithm, Trainer
from tandem.rollout.recorded_producer import record
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.run import Run
from tandem.runs.verdict import judge, too_few
from tandem.spec.evaluation import LossEvalSpec
from tandem.spec.train import SftStage
from tandem.types import Group, Message, Metrics, Task, Trajectory

R = TypeVar("R", bound=DataRow)

MORE_ROWS = "give it more rows, a larger data.eval_share, or rows of their own (data.eval_path, data.eval_split)"


def due(every: int, done: int, steps: int) -> bool:
    """Return whether to evaluate after `done` of `steps`; the last step has an evaluation of its own."""
    return bool(every) and done % every == 0 and done < steps


async def recorded_stage(
    run: Run,
    model: built_model.BuiltModel,
    trainer: Trainer,
    stage: SftStage,
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    seed: int,
    deterministic: bool,
    checkpointer: RunCheckpointer,
    before_record: Callable[[Metrics], None] | None = None,
) -> None:
    """Run the training loop on recorded groups, with an engine and a bridge that do nothing; versions start at 0."""
    training.show_life(trainer, run.progress.tick, run.note_option)
    call = training.caller(deterministic)
    store = build_groups.store(stage)

    async def record_step(metrics: Metrics) -> None:
        if before_record is not None:
            before_record(metrics)
        run.record(trainer.version, metrics)

    await run_loop(
        trainer=trainer,
        publisher=run_engines.no_publisher(call),
        store=store,
        producers=[build_groups.recordings(groups, store, seed)],
        make_batch=training.batches(stage, model, algorithm, run.callbacks.seen if run.callbacks else None),
        groups_per_step=stage.batch_size,
        last_version=stage.steps,
        after_step=record_step,
        call=call,
        checkpointer=checkpointer,
    )
    trainer.finish()


def recordings_of(
    model: built_model.BuiltModel,
    shown: Sequence[tuple[Task, Sequence[Message]]],
    tools: Sequence[Sequence[Any]],
    store: ImageStore | None,
) -> list[Trajectory]:
    """Return an environment's demonstrations as trajectories, each with the tools that its task offers; DataError if
    one is longer than the model's context. `store`: keeps their images."""
    recorded = [
        record(model.renderer, interned([*task.messages, *messages], store, f"task {task.id}"), task.id, offered)
        for (task, messages), offered in zip(shown, tools, strict=True)
    ]
    if longest := next((t for t in recorded if len(t.ids) > model.context), None):
        raise DataError(
            f"warmup.data: the demonstration of task {longest.task_id} has {len(longest.ids)} tokens, but the model's "
            f"context holds {model.context}; use shorter tasks, or a model with a longer context"
        )
    return recorded


def checked_rows(
    model: built_model.BuiltModel, data: training.FileOrDataset, run: Run, field: str
) -> tuple[list[Group], list[Group]]:
    """Load conversations as groups of one, training and held-out ones; report which rows were dropped and why."""
    longest = longest_of(model, data)

    def unusable(conversation: Conversation) -> str:
        try:
            ids, _ = model.renderer.conversation(conversation.messages)
        except TemplateError as error:
            return str(error)
        except ImageError as error:
            if not data.allow_bad_rows:
                raise DataError(f"{field}: {conversation.source}:{conversation.row}: {error}") from error
            return str(error)
        return f"longer than {longest} tokens" if len(ids) > longest else ""

    store = ImageStore(run.directory / IMAGES)

    def keep(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if model.renderer.images is None and has_images(messages):
            raise DataError(f"{field}: rows have images, but this model takes text only; choose one that sees")
        return interned(messages, store, "image")

    split = reported(
        load_rows(data, field, keep, sees=model.renderer.images is not None).without(unusable),
        "conversation",
        run,
        field,
    )
    train, held_out = (
        [[record(model.renderer, row.messages, f"{row.source}:{row.row}")] for row in rows]
        for rows in (split.train, split.held_out)
    )
    run.view.say("   one example; the tokens in [[ ]] are trained: " + marked(model, train[0][0]))
    return train, held_out


def longest_of(model: built_model.BuiltModel, data: training.FileOrDataset) -> int:
    """Return the most tokens that a row may have."""
    return min(data.max_tokens or model.context, model.context)


def reported(split: DataSplit[R], noun: str, run: Run, field: str) -> DataSplit[R]:
    """Report how many rows were dropped and why; DataError if none is left."""
    if not split.train:
        raise DataError(f"{field}: no {noun} is left to train on; {split.report.text()}")
    run.event("data", read=split.report.read, used=split.report.used, dropped=split.report.by_reason())
    run.view.say("   data: " + split.report.text())
    return split


def conclude_by_loss(run: Run, before: Sequence[float], after: Sequence[float], eval: LossEvalSpec, seed: int) -> None:
    """Compute the run's verdict from the held-out losses, which have the same order before and after."""
    if not before:
        why = "no rows were held out, so there is no comparison"
        run.conclude("undecided", {"metric": "loss", "tasks": 0, "why": why})
        return
    verdict = judge(before, after, confidence=eval.confidence, measure="loss", seed=seed)
    results = {"metric": "loss", "after_minus_before": verdict.difference}
    run.conclude(verdict.verdict, results | verdict.evaluation())


def say_if_too_few(run: Run, held_out: int, confidence: float, way_out: str) -> None:
    """Warn before training starts if there are too few held-out tasks or rows for a verdict."""
    if why := too_few(held_out, confidence):
        run.view.say(f"   the verdict will be undecided: {why}; {way_out}")


def marked(model: built_model.BuiltModel, trajectory: Trajectory) -> str:
    """Return a trajectory's text, with its trained tokens between [[ and ]], and one token for each image."""
    left_out = {at for image in trajectory.images for at in range(image.offset + 1, image.offset + image.length)}
    pairs = zip(trajectory.ids, trajectory.trained, strict=True)
    runs = groupby((pair for at, pair in enumerate(pairs) if at not in left_out), key=lambda pair: pair[1])
    texts = ((trained, model.renderer.decode([pair[0] for pair in run], skip_special=False)) for trained, run in runs)
    return "".join(f"[[{text}]]" if trained else text for trained, text in texts)
