"""The protocol between an engine and Tandem's code inside vLLM, defined once for both ends."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

MARK = "tandem"
"""Extra argument of a request whose tokens are recorded: the engine's name of the request."""

URGENT = "tandem_urgent"
"""Extra argument of an urgent request, which goes before all waiting ones."""
URGENT_PLACES = 1
"""Places in vLLM's batch that are reserved for urgent requests."""

TOGETHER, ABORT = "/tandem/generate", "/tandem/abort"
"""Routes that Tandem adds to vLLM's server: many requests in one, and names of those whose answer is not needed."""

SCHEDULER_TOLD = "TANDEM_SCHEDULER_TOLD"
"""Environment variable with the file in which vLLM's core writes why bulk scheduling is off."""


Since: TypeAlias = Sequence[Sequence[int]]
"""[position, version] pairs: from this position on, tokens are of this version. In order, from position 0."""


def packed(ids: array[int], logprobs: array[float], since: Since) -> list[Any]:
    return [base64.b64encode(ids.tobytes()).decode(), base64.b64encode(logprobs.tobytes()).decode(), since]


def unpacked(told: Sequence[Any]) -> tuple[array[int], array[float], Since]:
    """Unpack what `packed` returned. Both ends are on one machine, so the byte order is the machine's."""
    ids, logprobs, since = told
    return array("i", base64.b64decode(ids)), array("f", base64.b64decode(logprobs)), since
