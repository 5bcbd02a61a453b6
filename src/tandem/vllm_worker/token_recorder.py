"""Record sampled tokens and logprobs in a vLLM worker until the engine reads them.

consumes: the outputs of the GPU, step by step     waits for: nothing
produces: tokens and logprobs of a request, and which version made which token

vLLM sends each logprob from its core to its server as an object, which takes longer than the model itself. So a marked
request (`MARK` among its extra arguments) asks vLLM for no logprobs; the worker alone changes the request to ask. vLLM
then computes exactly the logprobs that it would have sent.

Requests have vLLM's names until they end, and the engine's names until they are read. A preempted request is computed
again under its old name, and its recorded tokens stay. A request that ended may have sampled more tokens than it
answered with, because vLLM's next step had begun. So the engine says how many tokens it wants, and the newest tokens of
a running request are held back.
"""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from tandem.errors import EngineError
from tandem.ops.vllm_token_protocol import MARK, packed

_log = logging.getLogger(__name__)

_MAX_UNREAD = 65536
"""Requests; older ones are dropped."""

_UNSURE = 2
"""The newest tokens of a running request: an earlier token may have ended it after vLLM's next step had begun."""

Reading: TypeAlias = Sequence[tuple[str, int, int]]
"""[name, from, to]: tokens of a request; to -1: all that cannot be taken back."""


class Unfit(Exception):
    """This vLLM lacks something that is needed here; the message says what."""


class _Record:
    __slots__ = ("ids", "logprobs", "since", "why")

    def __init__(self, version: int) -> None:
        self.ids, self.logprobs = array("i"), array("f")
        self.since = [[0, version]]
        self.why = ""
        """Why logprobs are missing; empty if they are complete."""


class RecordedTokens:
    def __init__(self, version: int) -> None:
        """`version`: of the served weights."""
        self._version = version
        self._open: dict[str, _Record] = {}
        self._unread: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._unread)

    @property
    def under_way(self) -> int:
        return len(self._open)

    def serve(self, version: int) -> None:
        """Stamp tokens with that version from now on. No step may be running."""
        if version == self._version:
            return
        self._version = version
        for record in self._open.values():
            if record.since[-1][0] == len(record.ids):
                record.since.pop()
            record.since.append([len(record.ids), version])

    def scheduled(self, step: Any) -> None:
        """Before a step. `step`: vLLM's scheduler's output."""
        for name in step.finished_req_ids:
            self._open.pop(name, None)
        for new in step.scheduled_new_reqs:
            marks = getattr(new.sampling_params, "extra_args", None)
            if not marks or MARK not in marks:
                continue
            new.sampling_params = copy.copy(new.sampling_params)  # a copy: the scheduler's own must ask for none
            new.sampling_params.logprobs = 0
            if new.req_id not in self._open:  # otherwise it was preempted
                self._open[new.req_id] = self._unread[marks[MARK]] = _Record(self._version)
        while len(self._unread) > _MAX_UNREAD:
            self._unread.pop(next(iter(self._unread)))

    def sampled(self, output: Any) -> None:
        """After a step. `output`: what the model runner answers."""
        if not self._open or output is None or not output.sampled_token_ids:
            return
        told, tokens, logprobs = output.logprobs, list[int](), list[float]()
        if told is not None:
            tokens, logprobs = told.logprob_token_ids[:, 0].tolist(), told.logprobs[:, 0].tolist()
        for row, (name, ids) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            record = self._open.get(name)
            if record is None or not ids:  # part of a prompt samples nothing
                continue
            if told is None:
                record.why = "vLLM computed no logprobs"
                continue
            if ids != [tokens[row]]:
                record.why = f"vLLM computed a logprob of {tokens[row]} for {ids}"
            record.ids.append(tokens[row])
            record.logprobs.append(logprobs[row])

    def read(self, running: Reading, ended: Reading, dropped: Iterable[str]) -> dict[str, Any]:
        """Return tokens and logprobs, as base64 of their numbers. Ended and dropped requests are then deleted."""
        news = {name: self._piece(name, start, end) for name, start, end in (*running, *ended)}
        for name in (*(name for name, _, _ in ended), *dropped):
            self._unread.pop(name, None)
        return news

    def _piece(self, name: str, start: int, end: int) -> list[Any]:
        record = self._unread.get(name)
        if record is None:  # on another rank, or still in vLLM's queue
            return packed(array("i"), array("f"), [])
        if record.why:
            raise EngineError(f"engine: {record.why}")
        part = slice(start, max(start, len(record.ids) - _UNSURE) if end < 0 else end)
        return packed(record.ids[part], record.logprobs[part], list(record.since))


def keep_sampled(runner: Any, config: Any, version: int) -> RecordedTokens:
    """Start to record in this worker, which serves that version. Unfit if this vLLM does not allow it."""
    if config.speculative_config is not None:
        raise Unfit("speculative decoding samples several tokens a step")
    schedule, sample = getattr(runner, "execute_model", None), getattr(runner, "sample_tokens", None)
    if not callable(schedule) or not callable(sample):
        raise Unfit("this vLLM's model runner has other steps than execute_model and sample_tokens")
    kept = RecordedTokens(version)

    def scheduled(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        kept.scheduled(scheduler_output)
        return schedule(scheduler_output, *args, **kwargs)

    def sampled(*args: Any, **kwargs: Any) -> Any:
        output: Any = sample(*args, **kwargs)
        if callable(take := getattr(output, "get_output", None)):  # the output is still being copied from the GPU
            output.get_output = _then(take, kept.sampled)
        elif hasattr(output, "sampled_token_ids"):
            kept.sampled(output)
        return output

    runner.execute_model, runner.sample_tokens = scheduled, sampled
    return kept


def _then(work: Callable[[], Any], look: Callable[[Any], None]) -> Callable[[], Any]:
    def both() -> Any:
        done = work()
        look(done)
        return done

    return both
