"""`broadcast` from several ranks to workers of a tensor-parallel engine, each in a process of its own, over gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from box_ends import Counted, as_served, boxes_of_worker, layout, piece_hash, weights_of

from stopwatch import Stopwatch
from tandem.bridge.collective import process_group
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.sender import BroadcastBridge, choose_transport
from tandem.engine.vllm.weight_update import whole
from tandem.errors import RanksDiverged, SyncError, SyncTimeout, TandemError
from tandem.ops.digest import fingerprints
from tandem.ops.parts import Box
from tandem.types import Sent

pytestmark = pytest.mark.usefixtures("forked_programs")
ENDS = Path(__file__).with_name("box_ends.py")
BUCKET_BYTES = 2**16
SHAPES = {name: shape for name, (_, shape) in layout().items()}
MODEL_BYTES = sum(tensor.nbytes for tensor in as_served(0).values())


class End:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(ENDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def say(self, verb: str, argument: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, argument]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "gone", "text": ""}

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Reserve:
    """The processes that live, and new ones in place of those that a test has ended."""

    def __init__(self) -> None:
        self._ends = list[End]()

    def take(self, count: int) -> list[End]:
        alive = [end for end in self._ends if end.process.poll() is None]
        self._ends = alive + [End() for _ in range(count - len(alive))]
        return self._ends[:count]

    def drop(self, end: End) -> None:
        end.end()
        self._ends.remove(end)

    def end(self) -> None:
        for end in self._ends:
            end.end()


@pytest.fixture(scope="module")
def reserve() -> Iterator[Reserve]:
    reserve = Reserve()
    yield reserve
    reserve.end()


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


class Fleet:
    """Rank 0 here, the other ranks and all workers in processes."""

    def __init__(
        self,
        reserve: Reserve,
        num_ranks: int,
        num_workers: int,
        *,
        deadline_s: float = 20.0,
        engines: int = 1,
        hosts: int = 1,
    ) -> None:
        self.num_ranks, self.num_workers, self.hosts = num_ranks, num_workers, hosts
        self.seconds = 0.0
        """That rank 0 took for the last version."""
        ends = reserve.take(num_ranks - 1 + num_workers * engines)
        self.ranks, self.workers = ends[: num_ranks - 1], ends[num_ranks - 1 :]
        self.bridge = BroadcastBridge(
            bucket_bytes=BUCKET_BYTES, deadline_s=deadline_s, ranks=num_ranks, row_shards=num_ranks // hosts
        )
        self.meet(engines)

    def meet(self, engines: int = 1, boxes: Sequence[Any] = ()) -> None:
        """`boxes`: of each worker, instead of the right ones."""
        source = self.bridge.source(self.num_workers * engines)
        shards = [boxes_of_worker(worker, self.num_workers) for worker in range(self.num_workers)]
        told: dict[str, Any] = {"workers": self.num_workers, "layout": layout()}
        if self.num_workers > 1:
            told["boxes"] = boxes or shards
        for engine in range(engines):
            source.attached({"boot_id": f"engine-{engine}", **told})
        for number, worker in enumerate(self.workers):
            first = number // self.num_workers * self.num_workers  # as engine/pool.py tells each engine
            worker.say("open", {**source.link, "rank": first})
            assert "error" not in worker.hear()

    def publish(
        self, version: int, fault: str = "", of_rank: int = 1, strikes: dict[str, int] | None = None
    ) -> tuple[Sent | TandemError, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what rank 0, the other ranks and the workers say. `strikes`: a signal for `rank 1` or `worker 0`."""
        strikes = strikes or {}
        for number, worker in enumerate(self.workers):
            worker.say("receive", [version, number % self.num_workers, strikes.get(f"worker {number}", 0)])
        link = dict(self.bridge.rank_link)
        for rank, end in enumerate(self.ranks, 1):
            of_this = fault if rank == of_rank or fault.startswith("replicas") else ""
            if fault == "replicas differ" and rank != of_rank:
                of_this = "replicas"
            strike = strikes.get(f"rank {rank}", 0)
            end.say("send", [link, version, rank, self.num_ranks, of_this, strike, self.hosts])
        own = fault if of_rank == 0 else "replicas" if fault.startswith("replicas") else ""
        with Stopwatch() as watch:
            try:
                sent: Sent | TandemError = self.bridge.send(weights_of(version, 0, self.num_ranks, own, self.hosts))
            except TandemError as error:
                sent = error
        self.seconds = watch.seconds
        if not isinstance(sent, Sent):
            self.bridge.close()  # as a publisher does, before it attaches again
        for name, strike in strikes.items():
            if strike == signal.SIGSTOP:
                kind, number = name.split()
                end = self.ranks[int(number) - 1] if kind == "rank" else self.workers[int(number)]
                os.kill(end.process.pid, signal.SIGKILL)
        with ThreadPoolExecutor(8) as threads:
            return sent, list(threads.map(End.hear, self.ranks)), list(threads.map(End.hear, self.workers))

    def check(self, version: int) -> None:
        """The version arrives, everywhere to the bit."""
        sent, ranks, workers = self.publish(version)
        assert isinstance(sent, Sent), sent
        assert not [each for each in (*ranks, *workers) if "error" in each]
        self.check_arrived(version, sent, workers)

    def check_arrived(self, version: int, sent: Sent, workers: Sequence[dict[str, Any]]) -> None:
        tensors = as_served(version)
        assert dict(sent.fingerprints) == fingerprints(tensors)
        for worker in workers:
            for name, top, bottom, left, right, _, found in worker["pieces"]:
                assert found == piece_hash(tensors[name], Box(top, bottom, left, right)), name
        for first in range(0, len(workers), self.num_workers):
            of_engine = workers[first : first + self.num_workers]
            assert whole([piece for each in of_engine for piece in each["pieces"]], SHAPES) == dict(sent.fingerprints)

    def close(self) -> None:
        self.bridge.close()


@pytest.fixture
def two_to_two(reserve: Reserve) -> Iterator[Fleet]:
    fleet = Fleet(reserve, 2, 2, deadline_s=8.0)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_worker_gets_its_part_and_no_process_moves_more_than_its_share(
    num_ranks: int, num_workers: int, reserve: Reserve, counted: Counted
) -> None:
    fleet = Fleet(reserve, num_ranks, num_workers)
    fleet.check(1)
    counted.take()
    sent, ranks, workers = fleet.publish(2)
    assert isinstance(sent, Sent), sent
    fleet.check_arrived(2, sent, workers)
    own = counted.take()
    if num_ranks == num_workers == 1:  # a broadcast of whole tensors, as ever
        assert own == {"sent_bytes": 0, "received_bytes": 0}
        assert sent.transport == {"requested": "auto", "engaged": "gloo", "why": ""}
    else:
        most = max(
            [own["sent_bytes"], *(each["sent_bytes"] for each in ranks), *(each["received_bytes"] for each in workers)]
        )
        assert most <= 1.05 * MODEL_BYTES / min(num_ranks, num_workers)
        assert sum(each["received_bytes"] for each in workers) == sent.bytes_moved
        assert sent.transport["ranks"] == str(num_ranks)
    fleet.close()


def test_two_engines_of_two_workers_each_get_their_own(reserve: Reserve) -> None:
    fleet = Fleet(reserve, 2, 2, engines=2)
    for version in (1, 2):
        fleet.check(version)
    fleet.close()


def test_what_several_ranks_hold_must_be_equal_and_is_sent_once(two_to_two: Fleet) -> None:
    sent, _, workers = two_to_two.publish(1, "replicas")
    assert isinstance(sent, Sent), sent
    two_to_two.check_arrived(1, sent, workers)
    sent, ranks, workers = two_to_two.publish(2, "replicas differ")
    assert isinstance(sent, RanksDiverged)
    assert "ranks 0 and ranks 1 hold different values of 'norm 1'" in str(sent)
    assert all("error" in each for each in (*ranks, *workers))
    two_to_two.meet()
    two_to_two.check(3)


def test_rows_that_two_hosts_hold_are_sent_once_and_must_be_equal(reserve: Reserve, counted: Counted) -> None:
    """Each host sends a part of them."""
    moved: list[int] = []
    for num_ranks, hosts in ((2, 1), (4, 2)):
        fleet = Fleet(reserve, num_ranks, 2, hosts=hosts)
        fleet.check(1)
        counted.take()
        sent, ranks, workers = fleet.publish(2)
        assert isinstance(sent, Sent), sent
        fleet.check_arrived(2, sent, workers)
        by_rank = [counted.take()["sent_bytes"], *(each["sent_bytes"] for each in ranks)]
        assert sum(by_rank) == sum(each["received_bytes"] for each in workers) == sent.bytes_moved
        assert max(by_rank) <= 1.2 * MODEL_BYTES / num_ranks
        moved.append(sent.bytes_moved)
        if hosts == 2:
            sent, ranks, workers = fleet.publish(3, "stale", of_rank=3)
            assert isinstance(sent, RanksDiverged)
            assert "ranks 1 and ranks 3 hold different values of 'embed', rows 130 to 259" in str(sent)
            assert all("error" in each for each in (*ranks, *workers))
        fleet.close()
    assert moved[0] == moved[1]


FAULTS = {
    "an older version": r"rank 1 of the trainer: it holds version 1 .*, and version 2 of 'full' weights is to be sent",
    "stale": r"the weights of rank 1 are those of version 1, and those of all other ranks have changed",
    "rows of an older version": r"was refused: .*receiver 1: .*'embed', rows 129 to 259 .* is not what was sent",
    "swapped rows": r"was refused: receiver 1: .*what arrived of 'q 1', rows 48 to 96 .* is not what was sent",
    "a part gone": r"rank 1 of the trainer: .*'q 1', rows 48 to 96 .* is not held any more",
    "a part left out": r"ranks of the trainer name 4608 of the 9216 elements of 'q 1'; the others are left out",
    "a part twice": r"rank 1 names 'q 1', rows 48 to 96 .* twice",
    "another's rows": r"rank 1 says that it holds 'q 1', rows 0 to 48 .*; its rows are 48 to 96",
    "off by one": r"rank 1 says that it holds 'q 1', rows 47 to 95 .*; its rows are 48 to 96",
    "columns for rows": r"rank 1 says that it holds 'q 1', rows 0 to 96 and columns 48 to 96; its rows are 48 to 96",
    "another shape": r"rank 1 of the trainer: .*'q 1' is \[96, 97\] and is served as \[96, 96\]",
    "unknown": r"rank 1 of the trainer: .*'q 100' is sent, and no engine serves it",
    "no number": r"rank 1 of the trainer: .*'q 1' holds a value that is not finite",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_are_caught_by_name_and_nothing_is_served(fault: str, two_to_two: Fleet) -> None:
    two_to_two.check(1)
    sent, _, workers = two_to_two.publish(2, fault)
    assert isinstance(sent, RanksDiverged if fault == "stale" else SyncError)
    with pytest.raises(type(sent), match=FAULTS[fault]):
        raise sent
    assert not [each for each in workers if "pieces" in each]
    assert two_to_two.seconds < 4  # of a deadline of 8 s
    two_to_two.meet()
    two_to_two.check(3)


class Lost:
    """A message of rank 0 to receiver 0, which is lost a second after it began."""

    def __init__(self) -> None:
        self.peer, self._ends = 2, time.monotonic() + 1

    @property
    def failed(self) -> bool:
        return self.is_completed()

    def is_completed(self) -> bool:
        return time.monotonic() > self._ends

    def wait(self) -> None:
        raise RuntimeError("Read error: Connection reset by peer")


def test_who_broke_off_is_named_though_another_partner_is_lost_first(
    two_to_two: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 breaks off, and rank 0 loses a receiver, which left because of that, before it looks for reports."""
    exchange = Group.exchange
    monkeypatch.setattr(process_group, "LISTEN_S", 60.0)
    monkeypatch.setattr(Group, "exchange", lambda *arguments: [*exchange(*arguments), Lost()])
    sent, _, _ = two_to_two.publish(1, "a part gone")
    assert isinstance(sent, SyncError)
    with pytest.raises(SyncError, match=FAULTS["a part gone"]):
        raise sent


@pytest.mark.parametrize("fault", ["a part left out", "no number", "swapped rows"])
def test_rank_0_is_looked_at_as_the_others_are(fault: str, two_to_two: Fleet) -> None:
    sent, ranks, _ = two_to_two.publish(1, fault, of_rank=0)
    assert isinstance(sent, SyncError)
    assert "'q 1'" in str(sent)
    if fault != "swapped rows":
        assert "'q 1'" in ranks[0]["text"]


WRONG_BOXES = {
    "off by one": ([1, 49], r"workers of engine engine-0 name 'q 1', rows 48 to 49 .* more than once"),
    "left out": ([0, 40], r"workers of engine engine-0 name 8448 of the 9216 elements of 'q 1'"),
}


@pytest.mark.parametrize("fault", WRONG_BOXES)
def test_an_engine_whose_boxes_are_wrong_gets_nothing(fault: str, two_to_two: Fleet) -> None:
    (top, bottom), says = WRONG_BOXES[fault]
    shards = [boxes_of_worker(worker, 2) for worker in range(2)]
    number = next(number for number, box in enumerate(shards[0]) if box[0] == "q 1")
    shards[0][number] = ["q 1", top, bottom, 0, 96]
    two_to_two.meet(boxes=shards)
    sent, ranks, workers = two_to_two.publish(1)
    assert isinstance(sent, SyncError)
    with pytest.raises(SyncError, match=says):
        raise sent
    assert "'q 1'" in ranks[0]["text"]
    assert not [each for each in workers if "pieces" in each]


@pytest.mark.parametrize("who", ["rank 1", "worker 0"])
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_in_time_and_a_new_meeting_goes_on(
    strike: signal.Signals, who: str, reserve: Reserve
) -> None:
    deadline_s = 4.0
    fleet = Fleet(reserve, 2, 2, deadline_s=deadline_s)
    fleet.check(1)
    sent, ranks, workers = fleet.publish(2, strikes={who: strike})
    assert isinstance(sent, SyncTimeout if strike == signal.SIGSTOP else SyncError)
    named = {"rank 1": "rank 1 of the trainer", "worker 0": "receiver 0"}[who]
    assert f"{named} said nothing more" in str(sent) or f"with {named}" in str(sent), sent
    assert fleet.seconds < deadline_s + 3.5
    victim = fleet.ranks[0] if who == "rank 1" else fleet.workers[0]
    others = [
        answer
        for end, answer in zip([*fleet.ranks, *fleet.workers], [*ranks, *workers], strict=True)
        if end is not victim
    ]
    assert all("error" in answer for answer in others)
    fleet.close()
    reserve.drop(victim)
    again = Fleet(reserve, 2, 2)
    again.check(3)
    again.close()


def test_a_rank_that_does_not_come_is_named_in_time(reserve: Reserve) -> None:
    fleet = Fleet(reserve, 2, 1, deadline_s=1.0)
    fleet.workers[0].say("receive", [1, 0, 0])
    with (
        Stopwatch() as watch,
        pytest.raises(SyncTimeout, match="rank 1 of the trainer did not say what it holds within 1 s"),
    ):
        fleet.bridge.send(weights_of(1, 0, 2))
    assert watch.seconds < 3
    assert fleet.workers[0].hear()["error"] == "SyncTimeout"
    fleet.close()


# --- transports


def test_shared_buffers_are_for_one_rank() -> None:
    with pytest.raises(
        SyncError, match=r"sync.backend = 'ipc': shared buffers are for one rank, and the trainer has 4"
    ):
        choose_transport("broadcast", "ipc", torch.device("cpu"), ["cpu"], roomy=True, other_ranks=["cpu"] * 3)
