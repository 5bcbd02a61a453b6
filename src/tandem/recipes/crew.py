"""The ranks of a run: `parallel.ranks` processes. This process is rank 0, which is the run itself.

On one host this process starts the others. In a job of several hosts (runs/job_hosts.py) the agents of the other hosts
start theirs. Under torchrun all run already, each with the same command line. All must see the run's directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tandem.errors import RankLost, SpecError
from tandem.io.file_system import mixes_writers
from tandem.io.shared_directory import token_in
from tandem.runs.job_hosts import check_count, job_hosts
from tandem.runs.rank_processes import RankProcesses, given_by_launcher, hosts_by_launcher, loopback_only
from tandem.spec.ranks import on_ranks
from tandem.spec.run import RlSpec, RunSpec


class Crew(Protocol):
    """What a recipe uses of rank 0's crew; `build/` makes it."""

    @property
    def broken(self) -> str: ...  # which rank is lost and why; empty while none is
    @property
    def hosts(self) -> list[str]: ...  # the name of each rank's host
    def order(self, name: str, **what: Any) -> list[Any]: ...
    def lost_by_now(self) -> str: ...  # which rank is lost, after a look at all of them; empty if none is
    def close(self) -> None: ...  # lets the other ranks go


_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_log = logging.getLogger(__name__)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOK_S = 0.2
_SETTLE_S = 1.0


def as_launched(spec: RunSpec) -> RunSpec:
    """Return the spec with the number of ranks and hosts that a launcher started; unchanged without a launcher.
    `shares` stays the same, so that a run resumed on fewer ranks gives the same bytes."""
    given = given_by_launcher()
    return spec if given is None else on_ranks(spec, given[1], hosts_by_launcher(spec.parallel.hosts))


def is_follower() -> bool:
    """Return whether a launcher started this process as a rank other than 0."""
    given = given_by_launcher()
    return given is not None and given[0] > 0


@contextmanager
def launched() -> Iterator[None]:
    """Wrap a command that trains, on every rank that a launcher started. If this one ends before the ranks have met,
    those that wait for it end, too."""
    try:
        yield
    except Exception as error:
        if is_follower():
            from tandem.build import crew as build

            build.refuse(given_store(), int(os.environ["RANK"]), error)
        raise
    finally:
        given = given_by_launcher()  # crew_of hides it once the ranks have met
        if given is not None and given[0] == 0:
            from tandem.build import crew as build

            build.call_off(given_store())


def follow(
    spec: RunSpec,
    directory: Path | None = None,
    *,
    patience_s: float | None = None,
    met_others: Callable[[], None] = lambda: None,
) -> None:
    """Run the rank that the launcher's variables name (not rank 0) until rank 0 ends the run. `directory`: the run's,
    if the command line of this rank names it. `patience_s`: end if rank 0's store does not answer within this time;
    None: torch decides. `met_others` is called when the ranks have met."""
    from tandem.build import crew as build

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = _local()
    import_module("torch.distributed")  # before the clock starts: from a slow disk it takes minutes
    connected = threading.Event()
    if patience_s is not None:
        threading.Thread(target=_end_unless, args=(connected, patience_s), name="connect", daemon=True).start()
    store = given_store()
    connected.set()
    with suppress(SystemExit):  # rank 0 has nothing to train; the caller then calls end_follower(), as after a run
        build.follow(
            store,
            rank,
            ranks,
            spec,
            local_rank=local_rank,
            local_ranks=local_ranks,
            directory=directory,
            met_others=met_others,
        )


def end_follower() -> NoReturn:
    """End this process at once: while Python takes itself down, a thread of torch that still runs may abort it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_unless(connected: threading.Event, patience_s: float) -> None:
    """End this process unless it is connected in time: a connection to a process that stands still has no deadline."""
    if not connected.wait(patience_s):
        _log.error("this rank ends: rank 0 has not answered for %.0f s", patience_s)
        logging.shutdown()
        os._exit(1)


@contextmanager
def crew_of(spec: RunSpec, directory: Path) -> Iterator[Crew | None]:
    """Yield rank 0's crew; None if the run is one process. The other ranks end with the context."""
    if spec.parallel.ranks == 1:
        yield None
        return
    given = given_by_launcher()
    hosts = job_hosts() if given is None else None
    check_count(hosts, spec.parallel.hosts)
    processes = None
    if given is None:
        if hosts is None:
            os.environ.update(loopback_only())
        processes = RankProcesses(spec.parallel.ranks, directory, hosts=hosts)
    crew: Crew | None = None
    try:
        from tandem.build import crew as build

        store = given_store() if processes is None else own_store(processes)
        local_rank, local_ranks = _local() if processes is None else (0, processes.on_host)
        crew = build.lead(spec, store, local_rank=local_rank, local_ranks=local_ranks, children=processes)
        _hide_launcher()
        with _launcher_heard(crew) if processes is None else nullcontext():
            if processes is None or hosts is not None:
                refuse_unreachable(crew, spec)
                refuse_unseen(crew, directory)
                refuse_mixed_writers(crew, spec, directory)
            yield crew
    finally:
        if crew is not None:
            crew.close()
        if processes is not None:
            processes.close(grace_s=0.0 if crew is None or crew.broken else 10.0)


@contextmanager
def _launcher_heard(crew: Crew) -> Iterator[None]:
    """A launcher sends SIGTERM when the user ends the run, and also once a rank has ended. Find out which: after a loss
    SIGTERM is ignored, because this process ends by itself, and first says which rank was lost."""
    usual: Any = signal.getsignal(signal.SIGTERM)

    def heard(number: int, frame: Any) -> None:
        if crew.lost_by_now():
            return
        if not callable(usual):
            raise SystemExit(128 + number)
        usual(number, frame)

    try:
        signal.signal(signal.SIGTERM, heard)
    except ValueError:  # another thread than the main one: signals are not this run's
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_look_at_signals, args=(reading, crew), name="launcher", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if crew.broken else usual)


def _look_at_signals(reading: int, crew: Crew) -> None:
    """Look for a lost rank at each SIGTERM. The main thread may wait for that rank, and hears of signals afterwards."""
    while numbers := os.read(reading, 16):
        if signal.SIGTERM in numbers:
            crew.lost_by_now()
    os.close(reading)


def refuse_unreachable(crew: Crew, spec: RunSpec) -> None:
    """SpecError where ranks of other hosts send weights and are told an address that leads to themselves."""
    away = next((rank for rank, host in enumerate(crew.hosts) if host != crew.hosts[0]), 0)
    if not away or not isinstance(spec, RlSpec) or spec.sync.traits.carries != "full":
        return
    if (host := getattr(spec.sync, "host", "")) in _LOOPBACK:
        raise SpecError(
            f"sync.host = '{host}': rank {away} on host {crew.hosts[away]} cannot reach rank 0 by it; set "
            f"sync.host to an address of {crew.hosts[0]} that the other hosts reach"
        )


def refuse_unseen(crew: Crew, directory: Path) -> None:
    """SpecError unless the ranks of all hosts see the run's directory: each of them writes into it."""
    with token_in(directory) as token:
        answers = crew.order("see", path=str(directory.absolute()), token=token)
    for rank, why in enumerate(answers):
        if why:
            raise SpecError(
                f"--run-dir {directory}: rank {rank} on host {crew.hosts[rank]} does not see it: {why}; name a "
                "directory that all hosts share, by the same absolute path in every command line"
            )


def refuse_mixed_writers(crew: Crew, spec: RunSpec, directory: Path) -> None:
    """SpecError where ranks of several hosts would write rows of one file, and a host may overwrite another's."""
    if spec.model.lora is not None or len(set(crew.hosts[: spec.parallel.row_shards])) == 1:
        return
    written = {"--run-dir": directory}
    if isinstance(spec, RlSpec) and (versions := getattr(spec.sync, "directory", "")):
        written["sync.directory"] = Path(versions)
    for field, path in written.items():
        for rank, kind in enumerate(crew.order("file_system", path=str(path.absolute()))):
            if mixes_writers(kind):
                raise SpecError(
                    f"{field} {path}: is on {kind} at rank {rank} on host {crew.hosts[rank]}, whose hosts write whole "
                    f"pages of a file, and with parallel.hosts = {spec.parallel.hosts} ranks of several hosts write "
                    "neighbouring rows: leave parallel.hosts out, or choose a directory on a file system that is "
                    "coherent between hosts (Lustre, GPFS, CephFS)"
                )


async def until_lost(crew: Crew | None, training: Coroutine[Any, Any, None]) -> None:
    """Await the training. RankLost as soon as a rank is lost, even while no order is in flight."""
    if crew is None:
        await training
        return
    task = asyncio.current_task()
    assert task is not None

    async def look() -> None:
        while not crew.broken:
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_SETTLE_S)  # an order in flight raises by itself
        task.cancel()

    looking = asyncio.create_task(look())
    try:
        await training
    except RankLost:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if crew.broken:
            raise RankLost(crew.broken) from error
        raise
    finally:
        looking.cancel()


def _hide_launcher() -> None:
    """Remove the launcher's variables: torch would take processes that rank 0 starts, such as engines, for ranks."""
    for name in [*os.environ]:
        if name in _LAUNCHER or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def _local() -> tuple[int, int]:
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def given_store() -> Any:
    """Return the store that the launcher's variables name."""
    dist: Any = import_module("torch.distributed")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agents have it
        store, _, _ = next(iter(dist.rendezvous("env://")))
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)


def own_store(processes: RankProcesses) -> Any:
    dist: Any = import_module("torch.distributed")
    listening = processes.listening.detach()
    return dist.TCPStore(
        processes.host, processes.port, is_master=True, wait_for_workers=False, master_listen_fd=listening
    )
