"""What is agreed between an engine and what it runs inside vLLM: written down once for both ends."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

MARK = "tandem"
"""Among the extra arguments of a request whose tokens and logprobs are kept: what the engine calls it."""

URGENT = "tandem_urgent"
"""Among them, of a request that goes before all that wait."""
URGENT_PLACES = 1
"""Places in vLLM's batch that are reserved for urgent requests."""

SCHEDULER_TOLD = "TANDEM_SCHEDULER_TOLD"
"""Names the file in which vLLM's core says why its scheduler is not sped up."""


Since: TypeAlias = Sequence[Sequence[int]]
"""[position, version]: a request's tokens from there on are that version's. In order; the first is of position 0."""


def packed(ids: array[int], logprobs: array[float], since: Since) -> list[Any]:
    return [base64.b64encode(ids.tobytes()).decode(), base64.b64encode(logprobs.tobytes()).decode(), since]


def unpacked(told: Sequence[Any]) -> tuple[array[int], array[float], Since]:
    """Of the same machine: bytes in its own order."""
    ids, logprobs, since = told
    return array("i", base64.b64decode(ids)), array("f", base64.b64decode(logprobs)), since
