"""A job on several hosts, whose provider started the same command line once on each.

What the hosts tell each other are files in the job's directory, which is on a disk that all of them share:

    the first host                                 another one, of number k
                                                   host-k.json: it is there
    rank 0 listens; meeting.json says where     -> starts its ranks, which connect to rank 0
    rank 0 takes that rank for lost             <- ended-k.json: which of its ranks have ended, and how
    rank 0 has ended: meeting.json is gone, or
    a later rank 0 wrote another                -> ends what still runs of its ranks
    over: there is nothing left to do           -> ends
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.job_types import HOST_VARIABLES

COME_S = 120.0
"""How long the first host's agent waits for those of the others."""
_MEETING, _OVER = "meeting.json", "over"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one crew meet."""

    port: int
    ranks: int
    run_dir: str
    id: str


@dataclass(frozen=True)
class JobHosts:
    """The hosts of this job, as this one sees them."""

    host: int
    """The number of this one."""
    count: int
    first: str
    """The address of the first host, as this one reaches it."""
    directory: Path
    """The job's."""

    # --- on the first host

    def missing(self) -> list[int]:
        """Return the numbers of the hosts that are not there."""
        return [number for number in range(1, self.count) if not self._of("host", number).exists()]

    def call(self, port: int, ranks: int, run_dir: Path) -> Meeting:
        """Have the other hosts start their ranks. Rank 0 listens at `port`."""
        meeting = Meeting(port, ranks, str(run_dir.absolute()), secrets.token_hex(8))
        atomic_write.write_json(self.directory / _MEETING, asdict(meeting))
        return meeting

    def let_go(self) -> None:
        (self.directory / _MEETING).unlink(missing_ok=True)

    def ended(self, meeting: Meeting) -> dict[int, str]:
        """Return how each ended process of the other hosts ended, by rank."""
        told = [_read(self._of("ended", number)) for number in range(1, self.count)]
        of_these = [each["ended"] for each in told if each.get("meeting") == meeting.id]
        return {int(rank): how for each in of_these for rank, how in each.items()}

    def say_over(self) -> None:
        (self.directory / _OVER).touch()

    # --- on another host

    def say_here(self, meeting: str) -> None:
        """`meeting`: the id of the last one for which this host has started its ranks."""
        atomic_write.write_json(self._of("host", self.host), {"meeting": meeting})

    def last_meeting(self) -> str:
        """Return what an agent before this one, which was killed, said last."""
        return str(_read(self._of("host", self.host)).get("meeting", ""))

    def meeting(self) -> Meeting | None:
        told = _read(self.directory / _MEETING)
        return Meeting(**told) if told else None

    def say_ended(self, meeting: Meeting, ended: Mapping[int, str]) -> None:
        atomic_write.write_json(self._of("ended", self.host), {"meeting": meeting.id, "ended": {**ended}})

    @property
    def is_over(self) -> bool:
        return (self.directory / _OVER).exists()

    def _of(self, what: str, number: int) -> Path:
        return self.directory / f"{what}-{number}.json"


def job_hosts() -> JobHosts | None:
    """Return the hosts of the job that this process belongs to; None if it is one host, or no job."""
    number, count, first = (os.environ.get(name, "") for name in HOST_VARIABLES)
    if int(count or 1) == 1:
        return None
    return JobHosts(int(number), int(count), first, Path(os.environ["TANDEM_JOB"]))


def check_count(found: JobHosts | None, hosts: int) -> None:
    """SpecError if the job has another number of hosts than the spec."""
    if found is not None and found.count != max(1, hosts):
        raise SpecError(
            f"parallel.hosts = {hosts}: the job has {found.count} hosts; leave the number of nodes out of the target's "
            "own options, or set parallel.hosts to it"
        )


def _read(path: Path) -> dict[str, Any]:
    """Return what the file says; empty if it is not there, or the shared disk does not answer: it is read again."""
    try:
        return cast("dict[str, Any]", read_json(path))
    except (OSError, ValueError):
        return {}
