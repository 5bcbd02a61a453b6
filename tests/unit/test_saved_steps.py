"""Which saved steps are still there, as the settings say: the rule by which a run deletes the others."""

from __future__ import annotations

from tandem.runs.saved_steps import best_step, kept_steps
from tandem.spec.checkpoint import CheckpointSpec


def test_the_newest_the_multiples_and_the_best_are_kept():
    saved = [10, 20, 30, 40, 50, 60]
    assert kept_steps(saved, CheckpointSpec(), None) == {50, 60}
    assert kept_steps(saved, CheckpointSpec(keep_last=1, keep_every=20), 30) == {20, 30, 40, 60}
    assert kept_steps(saved, CheckpointSpec(keep_best=False), 30) == {50, 60}
    assert kept_steps(saved, CheckpointSpec(), 25) == {50, 60}
    assert kept_steps([], CheckpointSpec(), None) == set()


def test_the_best_step_is_the_first_with_the_best_evaluation():
    accuracy = [{"step": 1}, {"step": 2, "eval/accuracy": 0.5}, {"step": 3, "eval/accuracy": 0.5}]
    loss = [{"step": step, "eval/loss": value} for step, value in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert (best_step(accuracy), best_step(loss), best_step([{"step": 1}])) == (2, 2, None)
