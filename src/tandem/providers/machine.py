"""Jobs on one machine, this one or one over OpenSSH. Both run the same text, `machine.sh`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from tandem.errors import MaybeLaunched, ProviderRefused, ProviderSilent
from tandem.providers.settings import TargetSettings, check_job, checked_name, checked_path
from tandem.providers.shell import Answer, Shell, SshSettings, exports, only_from_here
from tandem.types import Handle, Job, Need, Offer, Sight

_REFUSED = 69
_KILL_S = 2.0


class MachineSettings(TargetSettings):
    """One machine. Its jobs share it by what they need: CPUs, memory and GPUs."""

    directory: str = Field(default="~/tandem-jobs", min_length=1)
    """Where jobs have their directories on the machine."""


class LocalSettings(MachineSettings):
    """The machine that this process runs on."""

    kind: Literal["local"] = "local"
    pass_env: tuple[str, ...] = Field(default=(), strict=False)
    """Variables that jobs get from this process, beside the usual ones of a login. Others stay here: they may hold
    secrets."""


class SshTargetSettings(MachineSettings, SshSettings):
    """A machine that OpenSSH reaches. It needs Linux, a POSIX shell, flock, setsid and GNU grep; no daemon."""

    kind: Literal["ssh"] = "ssh"


class MachineProvider:
    """Starts command lines on one machine, as children of no process."""

    def __init__(self, settings: LocalSettings | SshTargetSettings) -> None:
        self.settings, self._root = settings, settings.directory
        if isinstance(settings, LocalSettings):
            env = only_from_here(settings.pass_env)
            self._name, self._shell = "local", Shell("this machine", env=env, timeout_s=settings.timeout_s)
        else:
            command = settings.command(settings.timeout_s)
            self._name, self._shell = settings.host, Shell(settings.host, command, timeout_s=settings.timeout_s)

    async def offers(self, need: Need) -> list[Offer]:
        """Return the machine as one offer."""
        answer = await self._run("probe", *_wanted(need))
        found = [(line[0], line[1:]) for line in answer.lines]
        facts = dict(found)
        if "cpus" not in facts or found[-1][0] not in ("ok", "busy", "never"):
            raise ProviderSilent(f"{self._shell.where}: an answer that is none: {answer.error or answer.out!r:.200}")
        gpus = [rest[0].split(", ") for kind, rest in found if kind == "gpu"]
        offer = Offer(
            name=self._name,
            gpus=len(gpus),
            gpu=gpus[0][3] if gpus else "",
            gpu_memory_gib=round(min((int(gpu[1]) for gpu in gpus), default=0) / 1024, 1),
            cpus=int(facts["cpus"][0]),
            memory_gib=round(int(facts["mib"][0]) / 1024, 1),
            usd_per_hour=self.settings.usd_per_hour,
        )
        verdict, rest = found[-1]
        if need.hosts > 1:
            return [replace(offer, fits=False, now=False, why_not="it is one host")]
        if verdict == "ok":
            return [offer]
        return [replace(offer, fits=verdict == "busy", now=False, why_not=rest[0])]

    async def launch(self, job: Job) -> Handle:
        """Begin the job, unless it has begun."""
        check_job(job, self.settings.kind)
        if job.offer not in ("", self._name):
            raise ProviderRefused(f"job.offer = '{job.offer}': this target has one offer, '{self._name}'")
        try:
            answer = await self._run("launch", job.name, *_wanted(job.need), *job.argv, env=exports(job.env))
        except ProviderSilent as error:
            raise MaybeLaunched(f"{job.name}: {error}") from error
        if answer.code == _REFUSED:
            raise ProviderRefused(f"{self._name}: {answer.lines[-1][-1]}")
        if answer.code != 0 or ["begun", job.name] not in answer.lines:
            raise MaybeLaunched(f"{job.name}: {self._shell.where} answered with code {answer.code}: {answer.error}")
        return Handle(job.name)

    async def find(self, prefix: str) -> list[Handle]:
        """Return every job that ever began here."""
        answer = self._checked(await self._run("find_jobs", checked_name(prefix, prefix=True)))
        return [Handle(name) for (name,) in answer.lines]

    async def look(self, handles: Sequence[Handle]) -> list[Sight]:
        """Return a sight of each, by one command for all."""
        if not handles:
            return []
        try:
            answer = self._checked(await self._run("look", *(checked_name(handle.name) for handle in handles)))
            seen = {line[0]: line[1:] for line in answer.lines if len(line) == 4}
        except (ProviderSilent, ProviderRefused) as error:
            return [Sight(handle, "unknown", why=str(error)) for handle in handles]
        return [_sight(handle, seen.get(handle.name)) for handle in handles]

    async def end(self, handle: Handle, grace_s: float) -> None:
        """Send SIGTERM to the job's first process; after `grace_s`, or once it has ended, SIGKILL to all the others."""
        name = checked_name(handle.name)
        left = await self._state_after("term", name)
        grace_until, rest_until, pause_s = time.monotonic() + grace_s, math.inf, 0.1
        while left != "no" and time.monotonic() < min(grace_until, rest_until):
            await asyncio.sleep(min(pause_s, max(0.0, grace_until - time.monotonic())))
            pause_s = min(2 * pause_s, 2.0)
            left = await self._state_after("lives", name)
            if left == "rest" and rest_until == math.inf:
                rest_until = time.monotonic() + _KILL_S
        if left != "no":
            self._checked(await self._run("end_now", name))

    async def read(self, handle: Handle, path: str, offset: int, limit: int) -> bytes:
        """Return bytes of a file in the job's directory; what it prints is in `console`."""
        name, path = checked_name(handle.name), checked_path(path)
        return self._checked(await self._run("read_file", name, path, str(offset), str(limit))).out

    async def _state_after(self, function: str, name: str) -> str:
        lines = self._checked(await self._run(function, name)).lines
        if not lines or lines[-1][0] not in ("first", "rest", "no"):
            raise ProviderSilent(f"{self._shell.where}: an answer that is none: {lines!r:.200}")
        return lines[-1][0]

    async def _run(self, function: str, *arguments: str, env: str = "") -> Answer:
        return await self._shell.run("machine.sh", self._root, function, *arguments, prelude=env)

    def _checked(self, answer: Answer) -> Answer:
        if answer.code != 0:
            raise ProviderSilent(f"{self._shell.where}: code {answer.code}: {answer.error}")
        return answer


def _wanted(need: Need) -> list[str]:
    memory = math.ceil(need.memory_gib * 1024), need.gpus, math.ceil(need.gpu_memory_gib * 1000)
    return [str(need.cpus), *map(str, memory), need.gpu]


def _sight(handle: Handle, seen: list[str] | None) -> Sight:
    match seen:
        case ["ended", code, _] if code.isdecimal():
            return Sight(handle, "ended", int(code))
        case ["running" | "gone" as state, _, why]:
            return Sight(handle, state, why=why)
        case _:
            return Sight(handle, "unknown", why=f"an answer that is none: {seen!r:.200}")
