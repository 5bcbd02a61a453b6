"""Resource limits of worker processes. They protect against accidents, not against malice."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES = 4 * 2**30
OPEN_FILES = 1024
PROCESSES = 256
"""Most processes of one worker. The fork server counts too, because the kernel does not limit root."""
_CPU_GRACE_S = 60


def limit_files() -> None:
    """Limit file sizes, before the environment is loaded: loading may write a data set but not fill the disk."""
    _lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    _lower(resource.RLIMIT_CORE, 0)


def limit_worker(memory_bytes: int, *, alone: bool = False) -> None:
    """Limit a worker. `memory_bytes`: address space beyond that in use now. `alone`: it has a user namespace."""
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    if address_space := _address_space():
        _lower(resource.RLIMIT_AS, address_space + memory_bytes)
    if alone:
        if counts_by_namespace():
            _lower(resource.RLIMIT_NPROC, PROCESSES)
    elif running := _processes_of_user():
        _lower(
            resource.RLIMIT_NPROC, running + 16 * PROCESSES
        )  # counts all processes of the user, so leave room for others


def limit_cpu(seconds: float) -> None:
    """Limit CPU time from now on, over all threads. A last resort, if the processes that should end it hang."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + _CPU_GRACE_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield each process, its parent and its group; none if /proc cannot be read."""
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    _, parent, group, *_ = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                    yield int(entry), int(parent), int(group)


def count_by_group() -> Mapping[int, int]:
    """Return the number of processes per process group; empty if /proc cannot be read."""
    return Counter(group for _, _, group in _processes())


def _lower(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    limit = limit if hard < 0 else min(limit, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (limit, limit))


def _address_space() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process and all its descendants hold."""

    processes: int
    resident_bytes: int
    """Memory that belongs to no file. Pages shared by forks count for each of them, so this may be too much."""
    pids: tuple[int, ...]


def held_below(roots: Collection[int]) -> dict[int, Holding]:
    """Return what each of these processes holds with its descendants, the process itself not counted."""
    parents = {pid: parent for pid, parent, _ in _processes()}
    below: dict[int, list[int]] = {root: [] for root in roots}
    for pid in parents:
        above = parents[pid]
        while above in parents and above not in below:
            above = parents[above]
        if above in below:
            below[above].append(pid)
    return {root: Holding(len(pids), sum(map(_own_bytes, pids)), tuple(pids)) for root, pids in below.items()}


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes, with each shared page divided among those that share it."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _own_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0


def counts_by_namespace() -> bool:
    """Return whether the kernel counts processes for RLIMIT_NPROC in each user namespace: Linux 5.14 and later."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


def _processes_of_user() -> int:
    """Count the user's threads, as the kernel does for RLIMIT_NPROC."""
    count, uid = 0, os.getuid()
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError):
                    if os.stat(f"/proc/{entry}").st_uid == uid:
                        count += len(os.listdir(f"/proc/{entry}/task"))
    return count
