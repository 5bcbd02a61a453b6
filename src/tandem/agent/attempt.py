"""Bring one attempt to its end: claim it, start the trainer, mirror its directory, tell how it ended.

consumes: the trainer's run directory, and what the control plane wants   waits for: a second, or the trainer's end
produces: requests of `tandem.shapes.agent`

All that it knows is in the job's directory, in the run directory and in the answer to `claim`: an agent that is killed
and started again goes on with the same trainer. While the control plane is silent the trainer trains on, and the run
directory keeps what is to be sent. Once the attempt is closed, the trainer is killed and nothing more is written.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tandem.agent.execution import KILL_S, CostDeadlines, boot_id, remember, remembered
from tandem.agent.link import PATIENCE_S, Link
from tandem.agent.packages import with_packages
from tandem.agent.shipping import Shipper
from tandem.agent.trainer import RunProcess, ServeProcess, only_agent
from tandem.errors import ControlError, ControlSilent, Fenced, RankLost, RunError, SpecError, Unproven
from tandem.io.bounded_json import read_json
from tandem.io.own_release import own_release
from tandem.runs.failure_diagnosis import classify_end
from tandem.runs.job_hosts import COME_S, JobHosts
from tandem.runs.liveness import read_sign
from tandem.shapes.agent import (
    FENCED,
    TOKEN_VARIABLE,
    AppendBody,
    Appended,
    ClaimBody,
    Claimed,
    EndBody,
    Ended,
    SignOfLife,
    Stream,
)

_log = logging.getLogger(__name__)

RUNS = "runs"
"""Beside the jobs' directories: a run's directory outlives the job, and a further attempt resumes it."""
_EVERY_S = 1.0
_SOON_S = 0.2
_PATIENCE_S = 86_400.0  # for the last words, while the control plane is silent
_CLAIM_S = 3_600.0
_CONSOLE = "console.txt"

State = Literal["succeeded", "failed", "cancelled", "stopped"]


@dataclass
class Agent:
    link: Link
    home: Path
    every_s: float = _EVERY_S
    hosts: JobHosts | None = None
    """Of the job, if it has several: this is the first."""
    claim_s: float = _CLAIM_S
    """How long it waits for an answer to its claim while no trainer of an agent before it runs. A control plane that
    comes back finds that the job has ended, and starts another."""
    _wanted: Literal["run", "stop", "cancel"] = "run"
    """By the control plane."""
    _limits: CostDeadlines = field(default_factory=CostDeadlines)
    _asked: bool = False
    """The machine asked this process to end."""
    _told: bool = False
    """The trainer was asked to end."""
    _cancelled_at: float = 0.0
    _wake: threading.Event = field(default_factory=threading.Event)
    _instance: str = ""

    def run(self) -> int:
        """Return the exit code: 0 once the control plane knows the end, `FENCED` if it is none of our business."""
        with only_agent(self.home):
            signal.signal(signal.SIGTERM, self._ask)
            signal.signal(signal.SIGINT, self._ask)
            name, self._limits = remembered(self.home)  # of an agent before, which was killed
            self._instance = name or secrets.token_hex(16)
            remember(self.home, self._instance, self._limits)
            trainer: RunProcess | None = None
            try:
                self._limits.check()
                absent = self._absent()
                claimed = self._claim()
                if claimed is None:
                    return 128 + signal.SIGTERM
                runs = self.home.parent / RUNS
                if (order := claimed.serve) is not None:
                    trainer = ServeProcess(self.home, runs / order.run, runs / claimed.run, order)
                else:
                    trainer = RunProcess(self.home, runs / claimed.run)
                return self._attend(claimed, trainer, absent)
            except Fenced as error:
                _log.error("%s", error)
                self._kill(trainer)
                return FENCED

    def _attend(self, claimed: Claimed, trainer: RunProcess, absent: str) -> int:
        trainer.run_dir.parent.mkdir(parents=True, exist_ok=True)
        spec_toml = claimed.spec_toml
        try:
            if absent:
                raise RankLost(absent)
            if claimed.serve is None:
                spec_toml = with_packages(spec_toml, trainer.run_dir, self.home, self.link)
        except (SpecError, ControlError, RunError, RankLost) as error:
            return self._tell_it_cannot_begin(error)
        most_s = self._limits.cancel_at + KILL_S - time.monotonic()
        if trainer.begin(spec_toml, claimed.secrets, TOKEN_VARIABLE, most_s):
            _log.info("attempt %s of run %s: the trainer has begun", claimed.n, claimed.run)
        else:
            _log.info("attempt %s of run %s: goes on with the same trainer", claimed.n, claimed.run)
        shipper = Shipper(trainer.run_dir, claimed.streams, extra={_CONSOLE: trainer.output})
        while (code := trainer.exit_code()) is None:
            self._wake.clear()
            if not self._exchange(shipper, trainer):
                starts = isinstance(trainer, ServeProcess) and not trainer.answers  # requests may wait for it
                soon = starts or self._want == "cancel"  # the owner waits for it
                self._wake.wait(min(self.every_s, _SOON_S) if soon else self.every_s)
            self._pass_on(trainer)
        return self._tell_the_end(shipper, trainer, code)

    def _tell_it_cannot_begin(self, error: Exception) -> int:
        """Say that a host or the packages of its environment could not be had, until the control plane knows."""
        _log.error("the trainer was not started: %s", error)
        body = EndBody(
            instance=self._instance, state="failed", why=f"{type(error).__name__}: {error}"[:4000],
            retriable=isinstance(error, ControlSilent | RankLost), exit_code=2,
        )  # fmt: skip
        until = self._patient_until()
        while time.monotonic() < until:
            told = self.link.ask("end", body, Ended, self._limits.patience_s(PATIENCE_S))
            if told is not None and told.written:
                return 0
            time.sleep(self.every_s)
        self._limits.check()
        return 1

    def _patient_until(self) -> float:
        """Return until when to try to say how it ended."""
        return min(time.monotonic() + _PATIENCE_S, self._limits.leave_at)

    def _exchange(self, shipper: Shipper, trainer: RunProcess) -> bool:
        """Renew the lease and send what grew; return whether more is there."""
        pieces = shipper.pieces()
        sign, serving, served = _sign(trainer.run_dir), "", dict[str, str]()
        if isinstance(trainer, ServeProcess) and (serving := trainer.url()):
            sign, served = SignOfLife(ticks=int(time.time()), limit_s=60.0, stage="serve"), trainer.served()
        body = AppendBody(instance=self._instance, sign=sign, serving=serving, served=served, pieces=tuple(pieces))
        try:
            told = self.link.ask("append", body, Appended, self._limits.patience_s(PATIENCE_S))
        except RunError as error:
            if not pieces:
                raise
            shipper.refused(str(error))
            return True
        if told is None:
            return False
        shipper.answered(told.streams)
        if isinstance(trainer, ServeProcess):
            trainer.serve_beside(told.adapters)
        self._wanted = told.want
        return bool(shipper.pieces())

    @property
    def _want(self) -> Literal["run", "stop", "cancel"]:
        """What the control plane wants, or what the run's costs demand, whichever is sooner over."""
        asked = {self._wanted, self._limits.demand()}
        return "cancel" if "cancel" in asked else "stop" if "stop" in asked else "run"

    def _pass_on(self, trainer: RunProcess) -> None:
        """Tell the trainer to end, once; a cancelled one is killed when it takes too long."""
        if (self._want != "run" or self._asked) and not self._told:
            self._told = True
            trainer.ask_to_end()
        if self._want == "cancel":
            self._cancelled_at = self._cancelled_at or time.monotonic()
            if time.monotonic() - self._cancelled_at > KILL_S:
                trainer.kill()

    def _tell_the_end(self, shipper: Shipper, trainer: RunProcess, code: int) -> int:
        """Bring over all files, then say how it ended, until the control plane has both."""
        state, why, retriable = _ending(trainer, code, self._want, asked=self._told)
        _log.info("the trainer has ended: %s%s", state, f": {why}" if why else "")
        until, rounds, shipper.ended = self._patient_until(), 0, True
        while time.monotonic() < until:
            while shipper.pieces() and time.monotonic() < until:
                if not self._exchange(shipper, trainer):
                    break
            files = shipper.digests()
            if not shipper.pieces():
                body = EndBody(
                    instance=self._instance, state=state, why=why[:4000], retriable=retriable, exit_code=code,
                    files=files,
                )  # fmt: skip
                told = self.link.ask("end", body, Ended, self._limits.patience_s(PATIENCE_S))
                if told is not None and told.written:
                    return 0
                if told is not None:
                    rounds += 1
                    _again(shipper, told.differ, leave_out=rounds > 5)
                    continue
            time.sleep(self.every_s)
        self._limits.check()
        _log.error("the control plane was silent for %.0f s: it does not know this end", _PATIENCE_S)
        return 1

    # --- the beginning

    def _absent(self) -> str:
        """Wait until the agents of all hosts are there; return which ones are not, if it takes too long."""
        if self.hosts is None:
            return ""
        until = time.monotonic() + COME_S
        while (missing := self.hosts.missing()) and time.monotonic() < until and not self._asked:
            self._wake.wait(self.every_s)
        number = f"host {missing[0]} of {self.hosts.count}" if missing else ""
        return number and (
            f"{number} has not come within {COME_S:.0f} s: all nodes must see {self.home} under this path, "
            "and what they print is in the job's console"
        )

    def _claim(self) -> Claimed | None:
        """Claim the attempt; None if the machine asked this process to end before there was an answer."""
        body = ClaimBody(
            instance=self._instance, host=platform.node()[:200], boot_id=boot_id(), pid=os.getpid(),
            gpus=_gpus(), release=own_release(),
        )  # fmt: skip
        before, since = RunProcess(self.home, self.home), time.monotonic()  # of an agent before
        while (claimed := self.link.ask("claim", body, Claimed)) is None:
            if self._wake.wait(self.every_s) or self._asked:
                return None
            self._limits.check()
            if before.exit_code() is None:
                since = time.monotonic()
            elif time.monotonic() - since > self.claim_s:
                raise Fenced(f"no control plane has answered the claim for {self.claim_s:g} s, and no trainer runs")
        self._limits = CostDeadlines.from_now_on(claimed.limits)
        remember(self.home, self._instance, self._limits)
        return claimed

    def _ask(self, *_: Any) -> None:
        self._asked = True
        self._wake.set()

    def _kill(self, trainer: RunProcess | None) -> None:
        trainer = trainer or RunProcess(self.home, self.home)  # of an agent before
        while trainer.exit_code() is None:
            trainer.kill()
            time.sleep(0.1)


def _sign(run_dir: Path) -> SignOfLife:
    sign = read_sign(run_dir)
    if sign is None:
        return SignOfLife()
    limit_s = min(max(sign.limit_s, 1e-3), 1e7)
    return SignOfLife(ticks=sign.ticks, limit_s=limit_s, stage=sign.stage[:100], step=sign.step)


def _ending(
    trainer: RunProcess, code: int, want: Literal["run", "stop", "cancel"], *, asked: bool
) -> tuple[State, str, bool]:
    """Return how the run ended, why, and whether a further attempt may succeed."""
    status = _status(trainer.run_dir)
    if code == 0 and status.get("state") == "succeeded":
        return "succeeded", "", False
    if want == "cancel":
        return "cancelled", "", False
    if asked:
        return "stopped", "" if code == 0 else f"exit code {code}", False
    if code == 0 and status.get("state") == "stopped":
        return "stopped", "", False
    told = status.get("failure")
    if status.get("state") == "failed" and isinstance(told, dict) and told.get("exit_code") == code:
        row = cast("dict[str, Any]", told)
        error = str(status.get("error", "")).partition("\n")[0]
        return "failed", f"{error} ({row['class']}: {row['next']})", bool(row["retriable"])
    if code == 128 + signal.SIGKILL:
        return "failed", "its supervisor was killed", True
    said, refused = trainer.last_words(), isinstance(trainer, ServeProcess) and code == Unproven.exit_code
    failure = classify_end(said, code)
    lines = [
        line for line in said.splitlines() if line.strip() and not line.startswith(("supervisor:", "tandem: next"))
    ]
    last = lines[-1].strip() if lines else "it printed nothing"
    return (
        "failed",
        f"exit code {code}: {last} ({failure.failure_class}: {failure.next})",
        failure.retriable and not refused,
    )


def _status(run_dir: Path) -> Mapping[str, Any]:
    try:
        return cast("dict[str, Any]", read_json(run_dir / "status.json"))
    except (OSError, ValueError):
        return {}


def _again(shipper: Shipper, differ: Mapping[str, Stream], *, leave_out: bool) -> None:
    for file, stream in differ.items():
        shipper.again(file, stream)
        if leave_out:
            _log.error("%s: cannot be mirrored", file)
            shipper.left_out.add(file)


def _gpus() -> tuple[str, ...]:
    """Return the names of this machine's GPUs, as the driver's own tool tells them; none without it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(told.splitlines()[:64])
