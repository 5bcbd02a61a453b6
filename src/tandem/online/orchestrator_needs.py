"""What the conductor needs of others: its end of a bridge, and a memory of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tandem.online.job_store import Job
from tandem.online.messages import Sequence1
from tandem.protocols import WeightSource


class OrchestratorBridge(WeightSource, Protocol):
    @property
    def reply(self) -> Mapping[str, Any]: ...


class SampleMemory(Protocol):
    """Earlier samples: see online/sample_replay.py."""

    def remember(self, job: Job, groups: Sequence[Sequence[Sequence1]]) -> None: ...
    def draw(self, job: Job, groups: Sequence[Sequence[Sequence1]]) -> tuple[list[list[Sequence1]], int]: ...
