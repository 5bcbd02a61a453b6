"""Run a run in a child process and restart it after transient failures: `tandem train SPEC --supervise`.

consumes: exits of the run's process   waits for: the process to exit, or a stall by the supervisor's own clock
produces: attempts.jsonl, with a row per exit: exit code, failure class and rule, what was done next

The process is on a leash (io/leash.py), so it ends with the supervisor. SIGTERM and Ctrl-C are passed on to it, and it
is not restarted after them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tandem.errors import NoRoom, RunError, RunOwned
from tandem.io import atomic_write, leash
from tandem.io.bounded_json import read_json
from tandem.io.jsonl import JsonlWriter
from tandem.io.process_identity import identity, is_there
from tandem.runs.failure_diagnosis import Failure, FailureClass, classify_end, kinds
from tandem.runs.lease import DirectoryLease, need_room, refuse_used
from tandem.runs.liveness import STACKS, Observer, read_sign
from tandem.runs.run_ending import say_failed
from tandem.spec.load import load_spec, parse_spec, to_toml

ATTEMPTS, _SUPERVISOR = "attempts.jsonl", "supervisor.json"
_TAIL_LINES = 200  # of stderr, where native code writes its last messages
_STACKS_S = 1.0  # time to write the stacks after SIGUSR1
_POLL_S = 0.2
_LEAST_MICRO_TOKENS = 256
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True, slots=True)
class Budget:
    """Restarts for a class of failures. The count starts again when the run reaches a new step."""

    restarts: int
    wait_s: float
    """Seconds before the first restart; doubled for each further one."""
    longest_wait_s: float

    def wait(self, restart: int) -> float:
        return min(self.wait_s * 2.0 ** (restart - 1), self.longest_wait_s)


BUDGETS: Mapping[FailureClass, Budget] = {
    "infra_retriable": Budget(5, 5.0, 300.0),
    "preempted": Budget(20, 5.0, 60.0),
    "stalled": Budget(3, 5.0, 60.0),
    "out_of_memory": Budget(4, 1.0, 10.0),
    "unknown": Budget(1, 5.0, 5.0),
}
_RENEWED: frozenset[FailureClass] = frozenset({"infra_retriable", "preempted", "stalled"})


@dataclass(frozen=True, slots=True)
class _ChildExit:
    code: int
    """Above 128: 128 plus the number of the signal that ended it."""
    text: str
    stalled: str = ""
    """What was observed, if the supervisor ended it because it stalled."""


@dataclass
class Supervisor:
    begin: Sequence[str]
    """The command that starts the run."""
    go_on: Sequence[str]
    """The command that resumes it, once the directory is a run."""
    directory: Path
    smaller: Callable[[], str] = lambda: ""
    """Halves the micro-batch and returns what it changed; empty if it cannot be smaller."""
    say: Callable[[str], None] = print
    budgets: Mapping[FailureClass, Budget] = field(default_factory=lambda: BUDGETS)
    _asked: int = 0
    _leash: subprocess.Popen[bytes] | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _unwritten: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def run(self) -> int:
        """Run until success or until no restart is left. Return the last exit code; after a failure, its class's
        code."""
        spent: dict[FailureClass, int] = {}
        furthest = attempt = 0
        with self._signals(), self._named():
            while True:
                attempt += 1
                before = self._status()
                kills = _oom_kills()
                end = self._attempt(self.go_on if (self.directory / "spec.toml").exists() else self.begin)
                if end.code == 0 or self._asked:
                    self._note(attempt, end.code, "asked to end" if self._asked else "done")
                    return end.code
                failure = self._diagnose(end, before, oom=_oom_kills() > kills)
                if (steps := self._steps()) > furthest:
                    furthest = steps
                    spent = {name: count for name, count in spent.items() if name not in _RENEWED}
                then, wait_s = self._decide(failure, spent)
                self._note(attempt, end.code, then, failure)
                self.say(f"supervisor: attempt {attempt} ended: {failure.failure_class} ({failure.rule or 'no rule'})")
                self.say(f"supervisor: {then or f'not again: {failure.next}'}")
                if not then:
                    self._conclude(failure)
                    return failure.exit_code
                if self._wake.wait(wait_s):
                    return 128 + self._asked

    def _decide(self, failure: Failure, spent: dict[FailureClass, int]) -> tuple[str, float]:
        """Return a text that says how the run is restarted (empty: it is not), and the seconds to wait before."""
        name = failure.failure_class
        budget = self.budgets.get(name)
        if not failure.retriable or budget is None or spent.get(name, 0) >= budget.restarts:
            return "", 0.0
        spent[name] = spent.get(name, 0) + 1
        wait_s, changed = budget.wait(spent[name]), ""
        if name == "out_of_memory":
            if not (changed := self.smaller()):
                return "", 0.0
            changed += "; "
        return f"{changed}restart {spent[name]} of {budget.restarts} for this class, in {wait_s:g} s", wait_s

    # --- one attempt

    def _attempt(self, command: Sequence[str]) -> _ChildExit:
        theirs, ours = os.pipe()
        holder = [sys.executable, "-I", leash.__file__, str(theirs), *command]
        try:
            self._leash = subprocess.Popen(holder, pass_fds=(theirs,), stderr=subprocess.PIPE, start_new_session=True)
        finally:
            os.close(theirs)
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        pump = threading.Thread(target=_pump, args=(self._leash, tail), daemon=True)
        pump.start()
        try:
            if self._asked:
                self._leash.send_signal(signal.SIGTERM)
            stalled = self._watch(self._leash)
        finally:
            os.close(ours)  # the leash then ends what still runs
            code = self._leash.wait()
        pump.join(timeout=5)
        return _ChildExit(code if code >= 0 else 128 - code, "".join(tail), stalled)

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the process ends or stalls; return what was observed at a stall, else an empty text."""
        observer, named = Observer(), False
        while process.poll() is None:
            if not named and (self.directory / "spec.toml").exists():
                with suppress(OSError):  # a full disk, for example; retried at the next look
                    atomic_write.write_json(self.directory / _SUPERVISOR, {"process": identity()})
                    named = True
            sign = read_sign(self.directory)
            if sign is not None and not is_there(sign.process):
                sign = None  # of an earlier attempt
            if not self._asked and observer.look(sign):
                stage = sign.stage if sign is not None else "boot"
                if sign is not None:
                    _ask_for_stacks(sign.process)
                return f"no progress for {observer.quiet_s:.1f} s in stage {stage}; {STACKS} may have the stacks"
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return ""

    def _diagnose(self, end: _ChildExit, before: Mapping[str, Any], *, oom: bool) -> Failure:
        if end.stalled:
            return classify_end(end.stalled)
        status = self._status()
        told = status.get("failure")
        if status != before and isinstance(told, dict) and status.get("state") in ("failed", "cancelled"):
            row = cast("dict[str, Any]", told)
            name = cast("FailureClass", row["class"])
            return Failure(name, str(row["rule"]), str(row["next"]), bool(row["retriable"]), kinds()[name].exit_code)
        text = end.text + ("\nthe kernel's counter oom_kill rose" if oom and end.code == 128 + signal.SIGKILL else "")
        return classify_end(text, end.code)

    # --- what is left on the disk

    def _status(self) -> Mapping[str, Any]:
        return _read_json(self.directory / "status.json")

    def _steps(self) -> int:
        sign = read_sign(self.directory)
        return max(int(self._status().get("steps_done") or 0), sign.step if sign is not None else 0)

    def _note(self, attempt: int, code: int, then: str, failure: Failure | None = None) -> None:
        row: dict[str, Any] = {"attempt": attempt, "exit_code": code, "steps_done": self._steps(), "then": then}
        if failure is not None:
            row |= {"failure": failure.row()}
        self._unwritten.append(row)
        if (
            self.directory / "spec.toml"
        ).exists():  # before that the directory must stay empty, because the run creates it
            with (
                suppress(OSError),
                JsonlWriter(self.directory / ATTEMPTS) as writer,
            ):  # on a full disk: written with the next row
                while self._unwritten:
                    writer.write(self._unwritten[0])
                    del self._unwritten[0]

    def _conclude(self, failure: Failure) -> None:
        """Write the failure to status.json if the process could not, because it was killed."""
        with suppress(
            OSError, RunError, NoRoom
        ):  # another process works on the run, or the disk is full, which was reported
            lease = DirectoryLease(self.directory)
            try:
                say_failed(self.directory, self._status(), failure, f"{failure.failure_class}: {failure.next}")
            finally:
                lease.close()

    @contextmanager
    def _named(self) -> Generator[None]:
        """Keep a file that names this supervisor: it tells `tandem watch` that the run may be restarted."""
        other = supervisor_of(self.directory)
        if is_there(other) and other != identity():
            raise RunOwned(
                f"{self.directory}: process {other.partition(':')[0]} supervises this run; wait for it, or end it first"
            )
        try:
            yield
        finally:
            if supervisor_of(self.directory) == identity():
                (self.directory / _SUPERVISOR).unlink(missing_ok=True)

    @contextmanager
    def _signals(self) -> Generator[None]:
        def pass_on(number: int, _frame: Any) -> None:
            self._asked = number
            self._wake.set()
            if self._leash is not None and self._leash.poll() is None:
                self._leash.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def supervisor_of(directory: Path) -> str:
    """Return the identity (io/process_identity.py) of the process that supervises this run; empty if there is none."""
    return str(_read_json(directory / _SUPERVISOR).get("process", ""))


def supervise_run(directory: str | Path, spec: str | Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Start the run of a spec file in `directory`, or resume the run there, in a child process that is restarted after
    transient failures. Return the exit code."""
    run_dir = Path(directory)
    from_here = {"", os.getcwd()} & set(sys.path)  # modules of this directory are importable under `python -m tandem`
    tandem = [sys.executable, *([] if from_here else ["-P"]), "-m", "tandem"]
    if spec is None:
        load_spec(run_dir / "spec.toml")  # refuse a wrong spec before a child starts
        begin: Sequence[str] = ()
    else:
        refuse_used(run_dir)
        need_room(run_dir, "begin")
        settings = [part for override in overrides for part in ("--set", override)]
        begin = [*tandem, "train", str(spec), "--run-dir", str(directory), *settings]
    go_on = [*tandem, "resume", str(directory)]
    return Supervisor(begin, go_on, run_dir, smaller=lambda: smaller_micro_batch(run_dir), say=_to_stderr).run()


def smaller_micro_batch(directory: Path) -> str:
    """Halve micro_tokens in the run's spec.toml, or set what its plan says fits if that is less. Return a text about
    the change; empty if it cannot be smaller.

    Every optimizer step has the same samples as before, in more micro-batches; sums may differ in their last bits.
    """
    path = directory / "spec.toml"
    raw = load_spec(path).model_dump(mode="json", exclude_none=True)
    stages = [cast("dict[str, Any]", raw[name]) for name in ("warmup", "train") if name in raw]
    if any(stage["gradient_release"] or stage["micro_tokens"] < 2 * _LEAST_MICRO_TOKENS for stage in stages):
        return ""
    was: int = stages[-1]["micro_tokens"]
    planned = _read_json(directory / "plan.json").get("largest_micro_tokens", 0)
    for stage in stages:
        half = stage["micro_tokens"] // 2
        stage["micro_tokens"] = planned if _LEAST_MICRO_TOKENS <= planned < half else half
    atomic_write.write_text(path, to_toml(parse_spec(raw)))
    return f"train.micro_tokens {was} -> {stages[-1]['micro_tokens']}, each step with the same samples as before"


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing or is not an object."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pump(process: subprocess.Popen[bytes], tail: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            tail.append(line.decode("utf-8", "replace"))
            with suppress(OSError):
                os.write(2, line)


def _ask_for_stacks(process: str) -> None:
    with suppress(ValueError, ProcessLookupError, PermissionError):
        os.kill(int(process.partition(":")[0]), signal.SIGUSR1)
        time.sleep(_STACKS_S)


def _oom_kills() -> int:
    """Return how many processes of this machine or container the kernel killed for memory; 0 if it does not say."""
    with suppress(OSError, ValueError):
        rows = dict(line.split() for line in _MEMORY_EVENTS.read_text(encoding="ascii").splitlines())
        return int(rows.get("oom_kill", 0))
    return 0
