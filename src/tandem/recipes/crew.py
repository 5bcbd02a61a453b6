"""The ranks of a run: `parallel.ranks` processes, of which this one is rank 0, the run itself.

On one host this process starts the others. Under torchrun they are there: each runs the same command line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import RankLost, SpecError
from tandem.runs.rank_processes import RankProcesses, given_by_launcher, loopback_only
from tandem.spec.run import RunSpec

if TYPE_CHECKING:
    from tandem.train.crew import Crew

_LOOK_S = 0.2
_SETTLE_S = 10.0
"""After a rank is lost: most seconds that a step may take to notice it."""


def is_follower(spec: RunSpec) -> bool:
    """Whether a launcher started this process as another rank than 0. SpecError if it started another number of ranks
    than the spec has."""
    given = given_by_launcher()
    if given is None:
        return False
    rank, ranks = given
    if ranks != spec.parallel.ranks:
        raise SpecError(
            f"parallel.ranks = {spec.parallel.ranks}: the launcher started {ranks} processes; set parallel.ranks = "
            f"{ranks}, or start {spec.parallel.ranks}"
        )
    return rank > 0


def follow(spec: RunSpec) -> None:
    """Be another rank than 0, as the launcher's variables say, until rank 0 ends the run."""
    from tandem.build import crew as build

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = _local()
    build.follow(_given_store(), rank, ranks, spec, local_rank=local_rank, local_ranks=local_ranks)


@contextmanager
def crew_of(spec: RunSpec, directory: Path) -> Iterator[Crew | None]:
    """Rank 0's crew; None if the run is one process. The other ranks end with it."""
    if spec.parallel.ranks == 1:
        yield None
        return
    given = given_by_launcher()
    processes = None
    if given is None:
        os.environ.update(loopback_only())
        processes = RankProcesses(spec.parallel.ranks, directory)
    crew: Crew | None = None
    try:
        from tandem.build import crew as build

        store = _given_store() if processes is None else _own_store(processes)
        local_rank, local_ranks = _local() if processes is None else (0, spec.parallel.ranks)
        crew = build.lead(spec, store, local_rank=local_rank, local_ranks=local_ranks, children=processes)
        yield crew
    finally:
        if crew is not None:
            crew.close()
        if processes is not None:
            processes.close(grace_s=0.0 if crew is None or crew.broken else 10.0)


async def until_lost(crew: Crew | None, training: Coroutine[Any, Any, None]) -> None:
    """Await the training. RankLost as soon as a rank is lost, also while no order is under way."""
    if crew is None:
        await training
        return
    task = asyncio.ensure_future(training)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if crew.broken and not task.done():
                await asyncio.wait({task}, timeout=_SETTLE_S)
                break
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if crew.broken and (task.cancelled() or not isinstance(task.exception(), RankLost)):
        raise RankLost(crew.broken) from (None if task.cancelled() else task.exception())
    task.result()


def _local() -> tuple[int, int]:
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def _given_store() -> Any:
    """The store that the launcher's variables name."""
    import torch.distributed as dist

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agents have it
        store, _, _ = next(iter(dist.rendezvous("env://")))
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)


def _own_store(processes: RankProcesses) -> Any:
    import torch.distributed as dist

    listening = processes.listening.detach()
    return dist.TCPStore(
        processes.host, processes.port, is_master=True, wait_for_workers=False, master_listen_fd=listening
    )
