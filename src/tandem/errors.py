"""Every error that Tandem raises on purpose, as one tree.

TandemError
├── SpecError              a spec or an option is wrong: field, value, what to write  (exit 2; also ValueError)
├── MissingExtra           a package of an optional extra is not installed    (exit 2; also ImportError)
├── DataError              a data set, or a file of it, is wrong              (exit 2; also ValueError)
├── EnvironmentFailed      the environment as a whole cannot be used
│   └── TooManyFailures    too large a share of the last groups failed
├── OwnCodeFailed          a loss, optimizer or callback of the user's own raised, or returned something else
├── EpisodeFailed          one episode raised, hung or returned no number; only its group is dropped
├── StoreError             the rollout store or the rollout service refused or failed
│   ├── Starved            too many groups in a row had nothing to learn from
│   ├── ProducerDied       the producer of groups ended or raised
│   ├── StoreTimeout       no group arrived in time                           (also TimeoutError)
│   ├── StoreOwned         another process holds the data directory
│   ├── StoreFull          the disk is full; nothing was stored, nothing was damaged
│   ├── StoreBroken        the disk failed; the service acknowledges nothing more until a restart
│   ├── QueueFull          the queue holds as many groups as it may
│   ├── NotKnown           no such trainer, environment, ticket, lease or group
│   ├── Conflict           the current state does not allow the request
│   │   ├── Fenced         a newer registration replaced this trainer
│   │   └── KeyReused      an idempotency key was sent again with another body
│   └── GroupRefused       a group breaks a rule of the wire format; names the field (exit 2; also ValueError)
├── EngineError            an engine failed or refused a request
│   ├── EngineLost         the engine is gone, or is no longer the one that was attached
│   ├── NotLetIn           the engine refused the token
│   └── EngineSilent       the engine did not answer in time                  (also TimeoutError)
├── SyncError              trainer and engine do not hold the same weights
│   └── SyncTimeout        the sender or a receiver did not arrive in time    (also TimeoutError)
├── RankLost               a process of the trainer failed, died or stopped answering; names rank and cause
├── RanksDiverged          ranks that must hold equal values do not; names the tensor and the ranks
├── LogprobGap             trainer and engine disagree about logprobs of the same tokens
├── NonFinite              a loss or a gradient is not finite
├── NothingLearned         steps were taken, but the weights did not change
├── CheckpointError        a checkpoint does not belong to what it is loaded into
│   └── CheckpointDamaged  a file was changed after it was written, or no complete checkpoint is left
├── CheckpointUnsaved      too many saves in a row failed (a full disk, for example)
├── NoRoom                 the disk has too little space for the run to begin or to go on  (exit 2)
├── ArtifactError          an artifact could not be stored, or does not exist
├── ProviderError          a provider did not do what it was asked
│   ├── ProviderRefused    it cannot or may not: nothing was started; says why
│   │   └── ProviderBusy   it cannot now: ask again later
│   ├── ProviderSilent     a host or an API did not answer: nothing is known  (also TimeoutError)
│   └── MaybeLaunched      the answer to a launch was lost: the job may run, or not
├── ControlError           a control server refused a request; has its status, code and field
│   ├── ControlNotAllowed  the key is not known, or lacks the scope
│   ├── ControlNotKnown    no such run, project, key or file, or another org's
│   ├── ControlConflict    the state or a budget does not allow it
│   ├── ControlInvalid     the request is wrong; names the field                (exit 2; also ValueError)
│   └── ControlSilent      the server did not answer in time                  (also TimeoutError)
├── ProcessEnded           one process of a run ended, so the others were ended too
├── TemplateError          a chat template cannot be used token by token      (exit 2; also ValueError)
├── TextTooLong            a text has more tokens than the model's context    (also ValueError)
├── ImageError             an image cannot be read, is too large, or has changed  (exit 2; also ValueError)
├── SamplingRefused        an engine cannot sample so; names the option       (also ValueError)
└── RunError               a run directory is not usable for the command      (exit 2)
    ├── RunOwned           another process works on it                        (exit 2)
    └── RunFenced          another process took it over; this one must not write any more
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all errors below. The command line prints the text without a traceback and exits with `exit_code`."""

    exit_code = 1


class SpecError(TandemError, ValueError):
    """A spec or an option is wrong. The text names the field, its value and what to write instead."""

    exit_code = 2


class MissingExtra(TandemError, ImportError):
    """A package of an optional extra is not installed. The text says how to install it."""

    exit_code = 2


class DataError(TandemError, ValueError):
    """A data set, or a file of it, is wrong."""

    exit_code = 2


class EnvironmentFailed(TandemError):
    """The environment as a whole cannot be used."""


class TooManyFailures(EnvironmentFailed):
    """Too large a share of the last groups failed."""


class OwnCodeFailed(TandemError):
    """A loss, optimizer or callback of the user's own raised, or returned something else. Names its file and line."""


class EpisodeFailed(TandemError):
    """One episode failed. `kind` is the counter that it belongs to: raised, hung, not_a_number, no_outcome, no_reply,
    template, context_full, judge; in worker processes also crashed, out_of_memory, protocol."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class StoreError(TandemError):
    """The rollout store refused or failed. `field` names the part of the request that is wrong; empty if none is."""

    def __init__(self, text: str, *, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class Starved(StoreError):
    """Too many groups in a row had nothing to learn from."""


class ProducerDied(StoreError):
    """The producer of groups ended or raised."""


class StoreTimeout(StoreError, TimeoutError):
    """No group arrived in time."""


class StoreOwned(StoreError):
    """Another process holds the data directory."""


class StoreFull(StoreError):
    """The disk is full. Nothing was stored, and nothing was damaged."""


class StoreBroken(StoreError):
    """The disk failed. The service acknowledges nothing more until a restart."""


class QueueFull(StoreError):
    """The queue holds as many groups as it may."""


class NotKnown(StoreError):
    """There is no such trainer, environment, ticket, lease or group."""


class Conflict(StoreError):
    """The current state does not allow the request."""


class Fenced(Conflict):
    """A newer registration replaced this trainer."""


class KeyReused(Conflict):
    """An idempotency key was sent again with another body."""

    def __init__(self, text: str) -> None:
        super().__init__(text, field="idempotency-key")


class GroupRefused(StoreError, ValueError):
    """A group breaks a rule of the wire format. `field` is what to change: `trajectories.2.logprobs`; in a request with
    several groups `groups.5.trajectories...`."""

    exit_code = 2

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}" if field else text, field=field)
        self.text = text


class EngineError(TandemError):
    """An engine failed or refused a request."""


class EngineLost(EngineError):
    """The engine is gone, or is no longer the one that was attached."""


class NotLetIn(EngineError):
    """The engine refused the token: it expects another one."""


class EngineSilent(EngineError, TimeoutError):
    """The engine did not answer in time."""


class SyncError(TandemError):
    """Trainer and engine do not hold the same weights."""


class SyncTimeout(SyncError, TimeoutError):
    """The sender or a receiver did not arrive in time."""


class RankLost(TandemError):
    """A process of the trainer failed, died or stopped answering. The text names the rank, its host and the cause."""


class RanksDiverged(TandemError):
    """Ranks that must hold equal values do not. The text names the tensor and the ranks."""


class LogprobGap(TandemError):
    """Trainer and engine disagree about logprobs of the same tokens."""


class NonFinite(TandemError):
    """A loss or a gradient is not finite."""


class NothingLearned(TandemError):
    """Steps were taken, but the weights did not change."""


class CheckpointError(TandemError):
    """A checkpoint does not belong to the run or model that it is loaded into."""


class CheckpointDamaged(CheckpointError):
    """A file was changed after it was written, or no complete checkpoint is left."""


class Unproven(CheckpointError):
    """Weights that were asked for by their step have no seal, or differ from it. They are not served."""

    exit_code = 65  # no other error's: the agent that started the server need not try again


class CheckpointUnsaved(TandemError):
    """Too many saves in a row failed."""


class NoRoom(TandemError):
    """The disk has too little space for the run to begin or to go on."""

    exit_code = 2


class ProcessEnded(TandemError):
    """One process of a run ended, so the others were ended too."""


class TemplateError(TandemError, ValueError):
    """A chat template cannot be used token by token."""

    exit_code = 2


class TextTooLong(TandemError, ValueError):
    """A text has more tokens than the model's context."""


class ImageError(TandemError, ValueError):
    """An image cannot be read, is too large, or is no longer what it was."""

    exit_code = 2


class SamplingRefused(TandemError, ValueError):
    """An engine cannot sample as a request asks. The text begins with the option's name."""


class RunError(TandemError):
    """A run directory is not usable for the command."""

    exit_code = 2


class ArtifactError(TandemError):
    """An artifact could not be stored, or does not exist."""


class RunOwned(RunError):
    """Another process works on the run."""


class RunFenced(RunError):
    """Another process took the run over. This one must not write any more."""

    exit_code = 1


class ProviderError(TandemError):
    """A provider did not do what it was asked."""


class ProviderRefused(ProviderError):
    """A provider cannot or may not do what it was asked. Nothing was started; the text says why."""


class ProviderBusy(ProviderRefused):
    """A provider has no room now. Nothing was started; it may have room later."""


class ProviderSilent(ProviderError, TimeoutError):
    """A host or an API did not answer in time, or not with an answer. Nothing is known about its jobs."""


class MaybeLaunched(ProviderError):
    """The answer to a launch was lost: the job may run, or not. `Provider.find` tells, or a second launch: it starts
    nothing twice."""


class ControlError(TandemError):
    """A control server refused a request. `field` names the part of the request that is wrong; empty if none is."""

    def __init__(self, text: str, *, status: int = 0, field: str = "", code: str = "") -> None:
        super().__init__(text)
        self.status, self.field, self.code = status, field, code


class ControlNotAllowed(ControlError):
    """The key is not known, was revoked or has expired; or it lacks the scope."""


class ControlNotKnown(ControlError):
    """There is no such run, project, key or file, or it is another org's."""


class ControlConflict(ControlError):
    """The current state or a budget does not allow the request."""


class ControlInvalid(ControlError, ValueError):
    """The request is wrong; `field` says where."""

    exit_code = 2


class ControlSilent(ControlError, TimeoutError):
    """The control server did not answer in time."""
