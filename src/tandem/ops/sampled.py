"""What is agreed between an engine and what it runs inside vLLM: written down once for both ends."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence

MARK = "tandem"
"""Among the extra arguments of a request whose tokens and logprobs are kept: what the engine calls it."""

SCHEDULER_TOLD = "TANDEM_SCHEDULER_TOLD"
"""Names the file in which vLLM's core says why its scheduler is not sped up."""


def packed(ids: array[int], logprobs: array[float]) -> list[str]:
    return [base64.b64encode(numbers.tobytes()).decode() for numbers in (ids, logprobs)]


def unpacked(told: Sequence[str]) -> tuple[array[int], array[float]]:
    """Of the same machine: bytes in its own order."""
    ids, logprobs = (base64.b64decode(each) for each in told)
    return array("i", ids), array("f", logprobs)
