"""Command lines on other machines: what a control plane and a provider tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

HOST_VARIABLES = ("TANDEM_HOST", "TANDEM_HOSTS", "TANDEM_FIRST_HOST")
"""Of a command line that a provider starts on several hosts: the number of its host, from 0; how many there are; the
address of the first one, as this one reaches it."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a job asks of each of its hosts, and for how long."""

    gpus: int = 0
    gpu_memory_gib: float = 0.0
    """Of each GPU."""
    gpu: str = ""
    """A part of the GPU's name, as in "H100"; empty: any."""
    cpus: int = 1
    memory_gib: float = 0.0
    disk_gib: float = 0.0
    hosts: int = 1
    """More than one: the provider starts the command line once on each, all or none, with HOST_VARIABLES."""
    seconds: float = 0.0
    """The longest that the job may run, for providers that ask; 0: as long as they allow."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of host that a provider has, measured against a `Need`."""

    name: str
    """What `Job.offer` says to get this one; unique within the provider's offers."""
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gib: float = 0.0
    cpus: int = 0
    memory_gib: float = 0.0
    hosts: int = 1
    """How many hosts of this kind there are."""
    usd_per_hour: float = 0.0
    """Of one host; 0 where the provider charges nothing."""
    fits: bool = True
    """Whether this offer can ever meet the need."""
    now: bool = True
    """Whether a job would begin at once. If it would not, but fits: the provider's queue takes it, or it is refused
    while the host is busy; `why_not` says which."""
    why_not: str = ""
    """Why a job would not begin at once, or never; empty if it would."""

    def beside(self, other: Offer) -> Offer:
        """Return both kinds of hosts as one: what each of them has at least."""
        least = {each: min(getattr(self, each), getattr(other, each)) for each in ("gpus", "cpus", "memory_gib")}
        return replace(self, hosts=self.hosts + other.hosts, **least)


@dataclass(frozen=True, slots=True)
class Job:
    """A command line to start once, in a directory of its own on the machine."""

    name: str
    """Its key, unique among all jobs of all time: letters, digits, "-", "_" and ".", at most 100."""
    argv: tuple[str, ...]
    need: Need = Need()
    offer: str = ""
    """The name of the offer to take; empty: the provider chooses."""
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Added to the environment of the command line. May hold secrets: never part of an argv or a log."""
    grace_s: float = 120.0
    """How long the job may take to end after SIGTERM, for providers that end jobs themselves."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a job is. Plain text, so that it can be stored as JSON."""

    name: str
    """Of the job."""
    key: str = ""
    """What the provider calls it, a Slurm job id for example; empty where the name is enough."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a provider sees of a job. It is a hint: a provider's word alone never ends an attempt."""

    handle: Handle
    state: Literal["waiting", "running", "ended", "gone", "unknown"]
    """waiting: in the provider's queue. running: at least one of its processes lives. ended: its first process returned
    `code`. gone: it does not run and never will, and no code is known. unknown: the host or the API did not answer."""
    code: int | None = None
    """The exit code, if it ended; 128 plus the signal that killed the process."""
    why: str = ""
    """In the provider's words: why it waits, is gone or is unknown."""
