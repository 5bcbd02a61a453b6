"""Every error that Tandem raises on purpose.

TandemError
├── SpecError              the spec is wrong: field, value, way out           (exit 2; also ValueError)
├── DataError              a data set or a file in it is wrong                (exit 2; also ValueError)
├── EnvironmentFailed      an environment, as a whole, cannot be used
│   └── TooManyFailures    too large a share of the last groups failed
├── EpisodeFailed          one episode raised, hung or returned no number: costs its group, no more
├── StoreError
│   ├── Starved            too many groups in a row had nothing to learn from
│   ├── ProducerDied       whoever made groups ended or raised
│   └── StoreTimeout       no group in time                                   (also TimeoutError)
├── EngineError
│   ├── EngineLost         the engine is gone, or is not the one that was attached any more
│   └── EngineSilent       the engine did not answer in time                  (also TimeoutError)
├── SyncError              trainer and engine do not hold the same weights
│   └── SyncTimeout        one end did not come                               (also TimeoutError)
├── LogprobGap             trainer and engine disagree about the same tokens
├── NonFinite              a loss or a gradient is not a number
├── NothingLearned         steps were taken and the weights did not move
├── CheckpointError        what was saved does not belong to what it is loaded into
├── TemplateError          a chat template cannot be used token by token
└── RunError               a run directory is not what it should be
"""

from __future__ import annotations


class TandemError(Exception):
    """The base of them all; the command line prints its text and no traceback."""

    exit_code = 1


class SpecError(TandemError, ValueError):
    exit_code = 2


class DataError(TandemError, ValueError):
    exit_code = 2


class EnvironmentFailed(TandemError):
    pass


class TooManyFailures(EnvironmentFailed):
    pass


class EpisodeFailed(TandemError):
    """One episode's own failure. `kind` is what it is counted under: raised, hung, not_a_number, no_outcome, no_reply,
    template, context_full."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class StoreError(TandemError):
    pass


class Starved(StoreError):
    pass


class ProducerDied(StoreError):
    pass


class StoreTimeout(StoreError, TimeoutError):
    pass


class EngineError(TandemError):
    pass


class EngineLost(EngineError):
    pass


class EngineSilent(EngineError, TimeoutError):
    pass


class SyncError(TandemError):
    pass


class SyncTimeout(SyncError, TimeoutError):
    pass


class LogprobGap(TandemError):
    pass


class NonFinite(TandemError):
    pass


class NothingLearned(TandemError):
    pass


class CheckpointError(TandemError):
    pass


class TemplateError(TandemError, ValueError):
    exit_code = 2


class RunError(TandemError):
    exit_code = 2
