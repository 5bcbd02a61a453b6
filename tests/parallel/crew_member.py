"""One process of a crew: `main`, forked from a process that has torch imported. Rank 0 tells how it ends."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tandem.errors import RankLost, SyncError, TandemError
from tandem.optim.by_owner import Owners, RankGroup
from tandem.train.crew import Crew

DEADLINE_S = 4.0


def main(rank: int, ranks: int, port: int, scenario: str, told: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    crew = Crew(store, rank, ranks, device=torch.device("cpu"), deadline_s=DEADLINE_S)
    crew.handle("pids", lambda: os.getpid())
    crew.handle("gather", lambda: crew.gather({"rank": rank}))
    crew.handle("add", lambda: add(crew))
    crew.handle("odd", lambda: odd(crew, scenario))
    crew.handle("round", lambda: round_of_owners(crew))
    if rank:
        try:
            crew.follow()
        except BaseException as error:  # noqa: BLE001 - as build/crew.py has it
            crew.fail(error)
        return
    pids = crew.order("pids")
    gathered = crew.order("gather")
    assert gathered[0] == gathered[-1] == [{"rank": each} for each in range(ranks)], gathered
    assert crew.order("add") == [float(ranks)] * ranks
    told.send(pids)
    told.send(outcome(crew, scenario))
    crew.close()


def add(crew: Crew) -> float:
    crew.tick()
    one = torch.ones(1)
    dist.all_reduce(one, group=crew.group)
    crew.tick()
    return one.item()


def round_of_owners(crew: Crew) -> None:
    """Send rows to their owners, but for the last rank, which stands still."""
    if crew.rank == crew.ranks - 1:
        time.sleep(600)
    owners = Owners(RankGroup(crew.rank, crew.ranks, crew.device, crew.group, crew.tick), {"w": (6, 2)}, torch.float32)
    top, bottom = owners.rows("w", (6, 2))
    owners.gather(0, {"w": torch.ones(bottom - top, 2)}, (6, 2) if owners.rounds[0][crew.rank] else None)


def odd(crew: Crew, scenario: str) -> float:
    """What the last rank does in this scenario; the others wait for it in a collective."""
    if crew.rank == crew.ranks - 1:
        if scenario == "raises":
            raise ValueError("CUDA out of memory, or so")
        if scenario == "hangs":
            time.sleep(600)
        if scenario == "refuses":
            raise SyncError("no engine")
    if scenario == "refuses":
        return 0.0
    return add(crew)


def outcome(crew: Crew, scenario: str) -> tuple[str, str]:
    try:
        if scenario in ("killed while idle", "stopped while idle"):
            started = time.monotonic()
            while not crew.broken and time.monotonic() - started < 60:
                time.sleep(0.05)
            return "RankLost", crew.broken
        if scenario in ("killed", "stopped"):
            while True:
                crew.order("add")
        crew.order("round" if scenario == "hangs in a round" else "odd")
    except RankLost as error:
        return type(error).__name__, str(error)
    except TandemError as error:
        assert crew.order("add") == [float(crew.ranks)] * crew.ranks, "the crew goes on"
        return type(error).__name__, str(error)
    return "nothing", ""
