"""Start the other ranks of a trainer. They end when rank 0 ends.

They get rank 0's address in the same environment variables that torchrun uses.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.errors import SpecError
from tandem.io.child_process import Child
from tandem.runs.job_hosts import JobHosts

_LOOPBACK = "127.0.0.1"
_LOOK_S = 1.0  # at what other hosts say, on a shared disk
_BEAT_S = 0.2


class Starting:
    """A rank's signs of life while it imports what it needs, until it has met the others. On a thread of its own."""

    def __init__(self, directory: Path, rank: int) -> None:
        """`directory`: of the run."""
        self._file = life_file(directory, rank)
        self._met = threading.Event()
        threading.Thread(target=self._beat, name="starting", daemon=True).start()

    def met(self) -> None:
        """From now on the rank shows its life to the others by itself."""
        self._met.set()

    def _beat(self) -> None:
        while not self._met.wait(_BEAT_S):
            with suppress(OSError):  # of a disk that fails; then this rank counts as silent
                self._file.touch()


def life_file(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"{rank}.starts"


def given_by_launcher() -> tuple[int, int] | None:
    """Return rank and number of ranks if a launcher (torchrun) started this process as a rank; else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def hosts_by_launcher(stated: int) -> int:
    """Return how many hosts each hold all rows, where a launcher started this process. `stated`: parallel.hosts; 0 is
    as many as the launcher has agents. SpecError if agents do not fit, which all ranks find out by themselves."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    of_agent = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    agents = int(os.environ.get("GROUP_WORLD_SIZE", ranks // of_agent))
    agent = int(os.environ.get("GROUP_RANK", rank // of_agent))
    if stated == 1:
        return 1
    if stated not in (0, agents):
        raise SpecError(
            f"parallel.hosts = {stated}: the launcher has {agents} agent{'s' * (agents > 1)}, each on its host; leave "
            "hosts out, or set hosts = 1, which cuts rows over all ranks"
        )
    if agents * of_agent != ranks or rank // of_agent != agent:
        raise SpecError(
            f"parallel.hosts = {stated or agents}: agent {agent} of {agents} has {of_agent} of {ranks} ranks, and "
            "every host needs equally many, numbered in a row; start as many with each agent, or set hosts = 1"
        )
    return agents


class HostRanks:
    """The processes of some ranks, on this host."""

    def __init__(
        self,
        numbers: range,
        ranks: int,
        on_host: int,
        directory: Path,
        meet: tuple[str, int],
        *,
        environment: Mapping[str, str],
        command: Sequence[str] = (),
    ) -> None:
        """Start the processes. `ranks`: of the whole crew; `on_host`: of each host. `directory`: of the run. `meet`:
        where rank 0 listens. `command`: replaces the usual program."""
        usual = [sys.executable, "-m", "tandem.recipes.follower", str(directory)]
        self._children: dict[int, Child] = {}
        self._directory, self._started = directory, time.time()
        for rank in numbers:
            self._children[rank] = Child(
                command or usual,
                ready_file=directory / "ranks" / f"{rank}.ready",
                log=directory / "ranks" / f"{rank}.txt",
                environment={
                    "RANK": str(rank), "LOCAL_RANK": str(rank % on_host), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(on_host), "MASTER_ADDR": meet[0], "MASTER_PORT": str(meet[1]),
                    **environment,
                },
                name=f"rank {rank}",
            )  # fmt: skip

    def ended(self) -> dict[int, str]:
        """Return how each ended process ended, by rank."""
        return {rank: child.exit_report() for rank, child in self._children.items() if child.exit_code is not None}

    def sign(self, rank: int) -> tuple[str, float] | None:
        """Return what changes while the process of this rank starts and does not stand still, and for how many seconds
        it has not; None of one that is not here."""
        if rank not in self._children:
            return None
        try:
            changed = life_file(self._directory, rank).stat().st_mtime
        except FileNotFoundError:
            changed = 0.0  # also the file of an earlier run may be there
        return str(changed), time.time() - max(changed, self._started)

    def kill(self) -> None:
        for child in self._children.values():
            child.stop(grace_s=0.0)

    def close(self, grace_s: float = 10.0) -> None:
        """Wait `grace_s` for each process to end, then kill the rest."""
        for child in self._children.values():
            child.ended_within(grace_s)
        self.kill()


class RankProcesses:
    """The processes of ranks 1 to `ranks` - 1. They connect to `listening`, which becomes rank 0's store."""

    def __init__(
        self, ranks: int, directory: Path, command: Sequence[str] = (), *, hosts: JobHosts | None = None
    ) -> None:
        """Start those of this host. `hosts`: of the job; the agents of the others start theirs. The rest as for
        `HostRanks`."""
        self.on_host = ranks // (hosts.count if hosts is not None else 1)
        self.listening = socket.create_server((_LOOPBACK if hosts is None else "", 0))
        self.host, self.port = _LOOPBACK, self.listening.getsockname()[1]
        self._here = HostRanks(
            range(1, self.on_host), ranks, self.on_host, directory, (self.host, self.port),
            environment=loopback_only() if hosts is None else {}, command=command,
        )  # fmt: skip
        self._hosts, self._elsewhere, self._looked_at = hosts, dict[int, str](), 0.0
        self._meeting = None if hosts is None else hosts.call(self.port, ranks, directory)

    def ended(self) -> Mapping[int, str]:
        """Return how each ended process ended, by rank."""
        if self._meeting is not None and self._hosts is not None and time.monotonic() - self._looked_at > _LOOK_S:
            self._elsewhere, self._looked_at = self._hosts.ended(self._meeting), time.monotonic()
        return {**self._here.ended(), **self._elsewhere}

    def sign(self, rank: int) -> tuple[str, float] | None:
        """As of `HostRanks`. Those of other hosts are not watched before they have met rank 0: a shared disk is late,
        and clocks differ."""
        return self._here.sign(rank)

    def kill(self) -> None:
        self._here.kill()

    def close(self, grace_s: float = 10.0) -> None:
        """Wait `grace_s` for each process to end, then kill the rest. Those of other hosts are their agents' to end."""
        if self._hosts is not None:
            self._hosts.let_go()
        self._here.close(grace_s)
        self.listening.close()


def loopback_only() -> Mapping[str, str]:
    """Return the environment that makes gloo use the loopback interface. By default gloo resolves the host's name,
    which may not lead to this host."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": name}
