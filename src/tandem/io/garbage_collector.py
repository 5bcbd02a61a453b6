"""Let Python's garbage collector pass over what stays until the end: modules, routes, tasks, tokenizers, compiled code.

A full collection visits every object. In a training process on a GPU that took 0.7 s, in every sixth of steps of 0.6 s.
"""

from __future__ import annotations

import gc

_STEPS_THAT_COMPILE = 2


def pass_over_what_is_there() -> None:
    """Collect what is garbage now, and do not visit again what is left."""
    gc.collect()
    gc.freeze()


class PassingOver:
    """For a run: what is there after its first steps is not visited again before the run ends."""

    def __init__(self) -> None:
        self._steps, self._is_first = 0, gc.get_freeze_count() == 0

    def stepped(self) -> None:
        self._steps += 1
        if self._steps == _STEPS_THAT_COMPILE:
            pass_over_what_is_there()

    def end(self) -> None:
        if self._is_first:
            gc.unfreeze()
