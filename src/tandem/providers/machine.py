"""Jobs on one machine, this one or one over OpenSSH. Both run the same text, `machine.sh`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from tandem.errors import ProviderRefused, ProviderSilent
from tandem.job_types import Job, Need, Offer
from tandem.providers.scripted import ScriptedProvider
from tandem.providers.settings import TargetSettings
from tandem.providers.shell import Shell, SshSettings, only_from_here


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


class MachineProvider(ScriptedProvider):
    """Starts command lines on one machine, as children of no process."""

    script = "machine.sh"

    def __init__(self, settings: LocalSettings | SshTargetSettings) -> None:
        self.settings = settings
        if isinstance(settings, LocalSettings):
            env = only_from_here(settings.pass_env)
            self._name, shell = "local", Shell("this machine", env=env, timeout_s=settings.timeout_s)
        else:
            command = settings.command(settings.timeout_s)
            self._name, shell = settings.host, Shell(settings.host, command, timeout_s=settings.timeout_s)
        super().__init__(settings, settings.directory, shell, kind=settings.kind)

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

    async def launch_arguments(self, job: Job) -> Sequence[str]:
        if job.offer not in ("", self._name):
            raise ProviderRefused(f"job.offer = '{job.offer}': this target has one offer, '{self._name}'")
        return *_wanted(job.need), *job.argv


def _wanted(need: Need) -> list[str]:
    memory = math.ceil(need.memory_gib * 1024), need.gpus, math.ceil(need.gpu_memory_gib * 1000)
    return [str(need.cpus), *map(str, memory), need.gpu]
