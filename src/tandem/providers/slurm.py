"""Jobs in the queue of a Slurm cluster, by its own commands, on this machine or on a login node over OpenSSH."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from tandem.errors import ProviderRefused, ProviderSilent
from tandem.job_types import HOST_VARIABLES, Job, Need, Offer
from tandem.providers.scripted import ScriptedProvider
from tandem.providers.settings import TargetSettings
from tandem.providers.shell import Shell, SshSettings, exports, only_from_here

_SLURMS = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LAUNCH_NODE_IPADDR")  # srun is run on the first host
_ON_EACH = " ".join(f'{name}="${slurms}"' for name, slurms in zip(HOST_VARIABLES, _SLURMS, strict=True)) + ' exec "$@"'
_GPUS = re.compile(r"gpu(?::([^:,()]+))?:(\d+)")


class SlurmSettings(TargetSettings, SshSettings):
    """A Slurm cluster. Its jobs wait in its queue; one may have several hosts."""

    kind: Literal["slurm"] = "slurm"
    host: str = Field(default="", pattern=r"^([^-\s][^\s]*)?$")
    """The login node, as in `ssh HOST`; empty: Slurm's commands are on this machine."""
    directory: str = Field(min_length=1)
    """Where jobs have their directories: on a disk that the login node and all nodes share under this path."""
    partitions: tuple[str, ...] = Field(default=(), strict=False)
    """The partitions to use; empty: all that Slurm shows you."""
    gpu_memory_gib: float = Field(default=0.0, ge=0)
    """Memory of each GPU, which Slurm does not know; 0: a job that asks for GPU memory is refused."""
    sbatch: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of sbatch, such as "--account=NAME" or "--qos=NAME"; they win over Tandem's own."""
    conf: str = ""
    """Slurm's configuration file (SLURM_CONF); empty: as Slurm is installed."""


class SlurmProvider(ScriptedProvider):
    """Asks Slurm for command lines. Slurm's word and the exit code on the shared disk are told apart in slurm.sh."""

    script = "slurm.sh"
    several_hosts = True

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings
        if settings.host:
            shell = Shell(settings.host, settings.command(settings.timeout_s), timeout_s=settings.timeout_s)
        else:
            shell = Shell("Slurm", env=only_from_here(("SLURM_CONF",)), timeout_s=settings.timeout_s)
        prelude = exports({"SLURM_CONF": settings.conf} if settings.conf else {})
        super().__init__(settings, settings.directory, shell, kind="slurm", prelude=prelude)

    async def offers(self, need: Need) -> list[Offer]:
        """Return an offer for each kind of node in each partition: PARTITION, or PARTITION/GPU."""
        offers: dict[str, Offer] = {}
        idle: dict[str, int] = {}
        for line in self._checked(await self._run("partitions")).lines:
            if len(line) != 6:
                raise ProviderSilent(f"{self._shell.where}: an answer that is none: {line!r:.200}")
            partition, hosts, state, cpus, mib, gres = line
            if self.settings.partitions and partition not in self.settings.partitions:
                continue
            gpu, gpus = _gpus(gres)
            name = f"{partition}/{gpu or 'gpu'}" if gpus else partition
            here = Offer(
                name, gpus, gpu, self.settings.gpu_memory_gib if gpus else 0.0, int(cpus.rstrip("+")),
                round(int(mib.rstrip("+")) / 1024, 1), int(hosts), self.settings.usd_per_hour,
            )  # fmt: skip
            offers[name] = offers[name].beside(here) if name in offers else here
            idle[name] = idle.get(name, 0) + (here.hosts if state == "idle" else 0)
        return [_measured(offer, need, idle[name]) for name, offer in offers.items()]

    async def launch_arguments(self, job: Job) -> Sequence[str]:
        offers = await self.offers(job.need)
        if job.offer and job.offer not in [offer.name for offer in offers]:
            known = ", ".join(offer.name for offer in offers)
            raise ProviderRefused(f"job.offer = '{job.offer}': Slurm has {known or 'no such partition'}")
        asked = [offer for offer in offers if job.offer in ("", offer.name)]
        fitting = sorted((offer for offer in asked if offer.fits), key=lambda offer: not offer.now)
        if not fitting:
            told = "; ".join(f"{offer.name}: {offer.why_not}" for offer in asked)
            raise ProviderRefused(f"no partition of Slurm can meet the need: {told or 'there is none'}")
        command = shlex.join(job.argv)
        if job.need.hosts > 1:  # one on each; once one has ended, the others have 30 s. srun inherits no CPUs
            each = f"--ntasks-per-node=1 --cpus-per-task={_cpus(job.need)} --wait=30"
            command = f"srun {each} -- sh -c {shlex.quote(_ON_EACH)} sh {command}"
        return command, *_flags(job, fitting[0]), *self.settings.sbatch


def _flags(job: Job, offer: Offer) -> list[str]:
    need = job.need
    flags = {
        "partition": offer.name.partition("/")[0],
        "nodes": need.hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": _cpus(need),
        "signal": f"B:TERM@{math.ceil(job.grace_s)}",  # before the time limit
    }
    if need.memory_gib:
        flags["mem"] = f"{math.ceil(need.memory_gib * 1024)}M"
    if need.disk_gib:
        flags["tmp"] = f"{math.ceil(need.disk_gib * 1024)}M"
    if need.gpus:
        flags["gres"] = ":".join(filter(None, ("gpu", offer.gpu, str(need.gpus))))
    if need.seconds:
        flags["time"] = math.ceil(need.seconds / 60)
    return [f"--{name}={value}" for name, value in flags.items()]


def _cpus(need: Need) -> int:
    return max(1, need.cpus)


def _gpus(gres: str) -> tuple[str, int]:
    """Return the type and number of a node's GPUs; of several types the first."""
    found = _GPUS.search(gres)
    return (found[1] or "", int(found[2])) if found else ("", 0)


def _measured(offer: Offer, need: Need, idle: int) -> Offer:
    never = _never(offer, need)
    if never:
        return replace(offer, fits=False, now=False, why_not=never)
    if idle < need.hosts:
        return replace(offer, now=False, why_not=f"{idle} of its {offer.hosts} nodes are idle; it waits in the queue")
    return offer


def _never(offer: Offer, need: Need) -> str:
    if need.gpus > offer.gpus:
        return f"a node has {offer.gpus} GPUs"
    if need.gpus and need.gpu.lower() not in offer.gpu.lower():
        return f"its GPUs are '{offer.gpu}'" if offer.gpu else "Slurm does not say what its GPUs are"
    if need.gpus and need.gpu_memory_gib > offer.gpu_memory_gib:
        if offer.gpu_memory_gib:
            return f"its GPUs have {offer.gpu_memory_gib:g} GiB"
        return "Slurm does not know the memory of its GPUs; write gpu_memory_gib into the file of targets"
    if need.cpus > offer.cpus:
        return f"a node has {offer.cpus} CPUs"
    if need.memory_gib > offer.memory_gib:
        return f"a node has {offer.memory_gib:g} GiB of memory"
    if need.hosts > offer.hosts:
        return f"it has {offer.hosts} nodes"
    return ""
