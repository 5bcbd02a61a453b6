"""Jobs that a text of this folder starts, finds, looks at and ends. The text runs where the jobs' directories are."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from tandem.errors import MaybeLaunched, ProviderBusy, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Sight
from tandem.providers.settings import TargetSettings, check_job, checked_name, checked_path
from tandem.providers.shell import Printed, Shell, exports

_REFUSED = 69
_KILL_S = 2.0


class ScriptedProvider:
    """What every such provider does. A subclass adds `offers`, and what its text wants to know of a job."""

    script: str
    several_hosts = False

    def __init__(self, settings: TargetSettings, root: str, shell: Shell, *, kind: str, prelude: str = "") -> None:
        """`root`: where the jobs' directories are. `prelude`: lines for each call of the text."""
        self._keep_days, self._kind, self._root, self._shell = settings.keep_days, kind, root, shell
        self._prelude = prelude

    async def launch_arguments(self, job: Job) -> Sequence[str]:
        """Return what the text wants to know of the job, its command line included. ProviderRefused if it cannot be."""
        raise NotImplementedError

    async def launch(self, job: Job) -> Handle:
        """Begin the job, unless it has begun."""
        check_job(job, self._kind, hosts=self.several_hosts)
        try:
            wanted = await self.launch_arguments(job)
            answer = await self._run("launch", str(self._keep_days), job.name, *wanted, env=exports(job.env))
        except ProviderSilent as error:
            raise MaybeLaunched(f"{job.name}: {error}") from error
        if answer.code == _REFUSED:
            kind, why = answer.lines[-1]
            raise (ProviderBusy if kind == "busy" else ProviderRefused)(f"{self._shell.where}: {why}")
        if answer.code != 0 or ["begun", job.name] not in answer.lines:
            raise MaybeLaunched(f"{job.name}: {self._shell.where} answered with code {answer.code}: {answer.error}")
        return Handle(job.name)

    async def find(self, prefix: str) -> list[Handle]:
        """Return every job that ever began here, and still has its directory."""
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

    async def _run(self, function: str, *arguments: str, env: str = "") -> Printed:
        prelude = "\n".join(filter(None, (self._prelude, env)))
        return await self._shell.run(self.script, self._root, function, *arguments, prelude=prelude)

    def _checked(self, answer: Printed) -> Printed:
        if answer.code != 0:
            raise ProviderSilent(f"{self._shell.where}: code {answer.code}: {answer.error}")
        return answer


def _sight(handle: Handle, seen: list[str] | None) -> Sight:
    match seen:
        case ["ended", code, _] if code.isdecimal():
            return Sight(handle, "ended", int(code))
        case ["waiting" | "running" | "gone" | "unknown" as state, _, why]:
            return Sight(handle, state, why=why)
        case _:
            return Sight(handle, "unknown", why=f"an answer that is none: {seen!r:.200}")
