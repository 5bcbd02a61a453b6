"""The SFT recipe: supervised training on recorded conversations, judged by the held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.build import engaged, training
from tandem.build.reference import set_reference
from tandem.recipes.supervised_steps import (
    MORE_ROWS,
    checked_rows,
    conclude_by_loss,
    due,
    say_if_too_few,
    supervised_stage,
)
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.eval_files import StoredEval, store_eval
from tandem.runs.run import Run
from tandem.spec.run import SftSpec
from tandem.types import Metrics, Trajectory


async def train_sft(spec: SftSpec, run: Run, checkpointer: RunCheckpointer, crew: Any = None) -> None:
    """Train as an SFT spec says: evaluate, train, evaluate again, export, give the verdict."""
    stage = spec.train
    model = training.run_model(spec, crew)
    for note in engaged.options(spec, model):
        run.note_option(*note)
    for text in model.renderer.mended:
        run.warn(text)
    recordings, held_out = checked_rows(model, spec.data, run, "data")
    held_out = held_out[: spec.eval.examples]
    say_if_too_few(run, len(held_out), spec.eval.confidence, MORE_ROWS)
    algorithm = training.algorithm_of(spec)
    if algorithm.needs_reference:
        set_reference(spec.algorithm, model, spec.precision)
    trainer = training.trainer(stage, model, algorithm, 0, spec.seed)
    checkpointer.load(trainer, "sft")
    run.status["steps_total"] = stage.steps

    def evaluate(name: str, label: str) -> list[float]:
        if (known := checkpointer.remembered(name)) is not None:
            return known
        losses = held_out_losses(model, held_out, stage.micro_tokens)
        checkpointer.remember(name, losses)
        if losses:
            run.evaluated(name, label, sum(losses) / len(losses), metric="loss")
            tasks = [recording.task_id for recording in held_out]
            store_eval(run.directory, StoredEval(trainer.version, name, "loss", spec.data.model_dump(), tasks, losses))
        return losses

    def evaluate_when_due(metrics: Metrics) -> None:
        if due(spec.eval.every, trainer.version, stage.steps):
            name = f"step {trainer.version}"
            if losses := evaluate(name, name):
                metrics["eval/loss"] = sum(losses) / len(losses)

    before = evaluate("before", "before training")
    run.stage("sft", stage.steps, f"{len(recordings)} conversations, {len(held_out)} held out")
    await supervised_stage(
        run,
        model,
        trainer,
        stage,
        recordings,
        algorithm,
        seed=spec.seed,
        deterministic=spec.deterministic,
        checkpointer=checkpointer,
        before_record=evaluate_when_due,
    )
    after = evaluate("after", "after training")
    training.export(model, run.directory / "export")
    conclude_by_loss(run, before, after, spec.eval, spec.seed)


def held_out_losses(model: training.BuiltModel, recordings: Sequence[Trajectory], micro_tokens: int) -> list[float]:
    """Return each conversation's mean loss per trained token, in the same order."""
    score = training.scorer(model, micro_tokens)
    return [-sum(logprobs) / len(logprobs) for logprobs in (score(recording) for recording in recordings)]
