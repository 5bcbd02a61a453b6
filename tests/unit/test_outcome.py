"""An invalid outcome fails its episode, in this process and in a worker."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tandem.env.outcome_check import checked
from tandem.env.worker_messages import FROM_EPISODE
from tandem.errors import EpisodeFailed
from tandem.rollout.wire import codec
from tandem.types import MAX_METRICS, Outcome, Trajectory


def metrics(count: int) -> dict[str, float]:
    return {str(number): 1.0 for number in range(count)}


def test_as_many_metrics_as_a_worker_may_say_are_sent_and_no_more():
    most = metrics(MAX_METRICS)
    said = FROM_EPISODE.validate_python({"op": "done", "said": [], "reward": 1.0, "metrics": most})
    assert checked("t", Outcome(1.0, most)) == (1.0, most)
    codec.encode([Trajectory([5, 6], [False, True], [0.0, -0.5], [-1, 0], 1.0, metrics=said.metrics)])
    with pytest.raises(EpisodeFailed, match=f"the limit is {MAX_METRICS}"):
        checked("t", Outcome(1.0, metrics(MAX_METRICS + 1)))
    with pytest.raises(ValidationError):
        FROM_EPISODE.validate_python({"op": "done", "said": [], "reward": 1.0, "metrics": metrics(MAX_METRICS + 1)})
