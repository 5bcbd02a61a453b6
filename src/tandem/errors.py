"""Every error that Tandem raises on purpose.

TandemError
├── SpecError              the spec is wrong: field, value, way out           (exit 2; also ValueError)
├── MissingExtra           a package of an extra is not installed               (exit 2; also ImportError)
├── DataError              a data set or a file in it is wrong                (exit 2; also ValueError)
├── EnvironmentFailed      an environment, as a whole, cannot be used
│   └── TooManyFailures    too large a share of the last groups failed
├── EpisodeFailed          one episode raised, hung or returned no number: costs its group, no more
├── StoreError
│   ├── Starved            too many groups in a row had nothing to learn from
│   ├── ProducerDied       a producer of groups ended or raised
│   ├── StoreTimeout       no group in time                                   (also TimeoutError)
│   ├── StoreOwned         another process holds the data directory
│   ├── StoreFull          no room on the disk: nothing was stored, nothing was damaged
│   ├── StoreBroken        the disk failed: nothing more is acknowledged until a restart
│   ├── QueueFull          as many groups wait as may
│   ├── NotKnown           no such trainer, environment, ticket, lease or group
│   ├── Conflict           the state does not allow it
│   │   ├── Fenced         a later registration of the trainer took its place
│   │   └── KeyReused      an idempotency key came again with another body
│   └── GroupRefused       a group breaks a rule of the wire; names the field (exit 2; also ValueError)
├── EngineError
│   ├── EngineLost         the engine is gone, or is not the one that was attached any more
│   └── EngineSilent       the engine did not answer in time                  (also TimeoutError)
├── SyncError              trainer and engine do not hold the same weights
│   └── SyncTimeout        one end did not come                               (also TimeoutError)
├── LogprobGap             trainer and engine disagree about the same tokens
├── NonFinite              a loss or a gradient is not a number
├── NothingLearned         steps were taken and the weights did not move
├── CheckpointError        what was saved does not belong to what it is loaded into
│   └── CheckpointDamaged  a file is not what was written; or no whole checkpoint is left
├── CheckpointUnsaved      saving failed too often in a row (a full disk, for one)
├── NoRoom                 the disk is too full for a run to begin, or to go on
├── ArtifactError          an artifact could not be stored, or is not there
├── ProcessEnded           one of the processes of a run ended, and the others with it
├── TemplateError          a chat template cannot be used token by token      (exit 2; also ValueError)
├── TextTooLong            a text has more tokens than a model's context       (also ValueError)
└── RunError               a run directory is not what it should be
    ├── RunOwned           another process works on it
    └── RunFenced          another process took it over: nothing more may be written by this one
"""

from __future__ import annotations


class TandemError(Exception):
    """The base of them all; the command line prints its text and no traceback."""

    exit_code = 1


class SpecError(TandemError, ValueError):
    exit_code = 2


class MissingExtra(TandemError, ImportError):
    exit_code = 2


class DataError(TandemError, ValueError):
    exit_code = 2


class EnvironmentFailed(TandemError):
    pass


class TooManyFailures(EnvironmentFailed):
    pass


class EpisodeFailed(TandemError):
    """One episode's own failure. `kind` is what it is counted under: raised, hung, not_a_number, no_outcome, no_reply,
    template, context_full, judge; of an environment in workers also crashed, out_of_memory, protocol."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class StoreError(TandemError):
    """`field` is what of the request it is about, where that is one thing."""

    def __init__(self, text: str, *, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class Starved(StoreError):
    pass


class ProducerDied(StoreError):
    pass


class StoreTimeout(StoreError, TimeoutError):
    pass


class StoreOwned(StoreError):
    pass


class StoreFull(StoreError):
    pass


class StoreBroken(StoreError):
    pass


class QueueFull(StoreError):
    pass


class NotKnown(StoreError):
    pass


class Conflict(StoreError):
    pass


class Fenced(Conflict):
    pass


class KeyReused(Conflict):
    def __init__(self, text: str) -> None:
        super().__init__(text, field="idempotency-key")


class GroupRefused(StoreError, ValueError):
    """`field` is what to change: `trajectories.2.logprobs`; in a post of several groups, `groups.5.trajectories...`."""

    exit_code = 2

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}" if field else text, field=field)
        self.text = text


class EngineError(TandemError):
    pass


class EngineLost(EngineError):
    pass


class NotLetIn(EngineError):
    """It has another token."""


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


class CheckpointDamaged(CheckpointError):
    pass


class CheckpointUnsaved(TandemError):
    pass


class NoRoom(TandemError):
    exit_code = 2


class ProcessEnded(TandemError):
    pass


class TemplateError(TandemError, ValueError):
    exit_code = 2


class TextTooLong(TandemError, ValueError):
    pass


class RunError(TandemError):
    exit_code = 2


class ArtifactError(TandemError):
    pass


class RunOwned(RunError):
    pass


class RunFenced(RunError):
    exit_code = 1
