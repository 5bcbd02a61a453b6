"""Faults of the original Atropos server that this one does not have."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from atropos_bodies import encoded, group
from atropos_served import TRAINER, Client, seeds, sequences, serving_atropos
from served import wait_until

from tandem.io import atomic_write
from tandem.rollout.atropos.service import Atropos
from tandem.rollout.queue.queue import RolloutQueue


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving_atropos(tmp_path) as client:
        yield client


def score(seed: int, size: int = 2) -> float:
    return group(size, seed=seed)["scores"][0]


# --- batches


def test_the_oldest_groups_come_first(client: Client):
    client.begin(batch_size=4)
    client.join()
    for seed in range(1, 7):
        client.put(seed=seed)
    taken = [seeds(client.get("/batch")["batch"]) for _ in range(3)]
    assert taken == [[score(1), score(2)], [score(3), score(4)], [score(5), score(6)]]


def test_the_step_counts_batches_that_were_trained_on_not_those_that_could_be_made(client: Client):
    client.begin(batch_size=2)
    client.join()
    steps: list[int] = []
    for seed in range(3):
        client.put(seed=seed)
    for _ in range(4):
        client.get("/batch")
        steps.append(client.get("/status")["current_step"])
    assert steps == [0, 1, 2, 3]
    assert client.get("/batch") == {"batch": None}
    assert client.get("/status") == {"current_step": 3, "queue_size": 0}


@pytest.mark.parametrize("length", [50_000, 250])
def test_a_batch_that_a_trainer_did_not_read_to_its_end_comes_again(client: Client, length: int):
    """More of it than the system's buffers take, which are small here: else it is sent, whoever reads. The shorter one
    fits what a server of asyncio takes into a buffer of its own before it lets anybody wait."""
    client.begin(batch_size=8, max_token_len=50_000)
    client.join(group_size=8)
    first, second = (group(8, length=length, seed=seed) for seed in (1, 2))
    for each in (first, second):
        client.post("/scored_data", each)
    assert seeds(client.get("/batch")["batch"]) == first["scores"][:1]
    for waits_s in (0.0, 0.5):  # in the latter there is time to note that all but the end went out
        with hung_up(client):
            time.sleep(waits_s)
        wait_until(lambda: not client.atropos.busy)
    assert seeds(client.get("/batch")["batch"]) == second["scores"][:1]
    assert client.get("/status")["current_step"] == 1
    assert client.atropos.counts["batches_again"] >= 1


@contextmanager
def hung_up(client: Client) -> Iterator[None]:
    """Asks for a batch, reads its beginning, and at the end hangs up."""
    (listening,) = client.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections that it takes from now on
    url = httpx.URL(str(client.http.base_url))
    with socket.socket() as hasty:
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hasty.connect((url.host, url.port))
        token = client.http.headers["authorization"]
        hasty.sendall(f"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {token}\r\n\r\n".encode())
        hasty.recv(100)
        yield


def test_a_batch_whose_end_cannot_be_noted_comes_again(client: Client, monkeypatch: pytest.MonkeyPatch):
    client.begin(batch_size=2)
    client.join()
    for seed in (1, 2):
        client.put(seed=seed)
    written, failed = atomic_write.write_bytes, list[bytes]()

    def fails_once(path: Path, content: bytes) -> None:
        if b'"handed_over":true' in content and not failed:
            failed.append(content)
            raise OSError(errno.ENOSPC, "no space left")
        written(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_write, "write_bytes", fails_once)
        with pytest.raises(httpx.HTTPError):
            client.http.get("/batch")
    assert failed
    assert not client.atropos.busy
    assert seeds(client.get("/batch")["batch"]) == [score(1)]
    assert client.get("/status")["current_step"] == 0
    assert seeds(client.get("/batch")["batch"]) == [score(2)]


def test_those_that_name_no_environment_are_of_one(client: Client):
    client.begin(batch_size=2)
    bodies = [encoded(seed=seed, env_id=None) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert {answer.status_code for answer in threads.map(client.send, bodies)} == {200}
    assert len(client.atropos.queue.status()["environments"]) == 1


def test_a_trainer_that_is_started_again_gets_the_batch_again(client: Client):
    client.begin(batch_size=2)
    client.join()
    client.put(seed=1)
    first = client.get("/batch")["batch"]
    client.post("/register", TRAINER | {"batch_size": 2})
    assert client.get("/status") == {"current_step": 0, "queue_size": 1}
    assert client.get("/batch")["batch"] == first


def test_the_clock_goes_on_when_a_trainer_resumes(client: Client):
    client.begin(batch_size=2, starting_step=40)
    assert client.get("/status")["current_step"] == 40
    client.join()
    client.put(seed=1)
    client.get("/batch")
    client.get("/batch")
    client.post("/register", TRAINER | {"batch_size": 2})
    assert client.get("/status")["current_step"] == 41


def test_groups_of_many_sizes_make_batches_of_exactly_the_size(client: Client):
    client.begin(batch_size=16)
    client.join(group_size=4)
    sizes = [3, 5, 4, 8, 1, 7, 2, 6, 16, 4, 4, 4, 3, 1]
    for seed, size in enumerate(sizes):
        client.put(size=size, seed=seed)
    taken = []
    while (batch := client.get("/batch")["batch"]) is not None:
        assert sequences(batch) == 16
        taken += [len(each["tokens"]) for each in batch]
    assert sum(taken) == sum(sizes) // 16 * 16
    assert client.get("/status")["current_step"] == 4


def test_a_group_larger_than_registered_leaves(client: Client):
    client.begin(batch_size=8)
    client.join(group_size=2)
    assert client.put(size=8, seed=1)["status"] == "buffered"
    assert sequences(client.get("/batch")["batch"]) == 8


def test_a_group_larger_than_a_batch_is_refused_at_once(client: Client):
    client.begin(batch_size=4)
    client.join()
    answer = client.send(encoded(6))
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "tokens")


# --- posts


def test_the_same_post_five_times_is_one_group_and_counted(client: Client):
    client.begin(batch_size=4)
    client.join()
    before = client.atropos.counts["duplicate_posts"]
    for _ in range(5):
        assert client.put(seed=1) == {"status": "received"}
    assert client.get("/status")["queue_size"] == 1
    assert client.atropos.counts["duplicate_posts"] == before + 4
    other = client.join("other")
    client.put(seed=1, env_id=other)
    assert client.get("/status")["queue_size"] == 2


def test_equal_bytes_after_two_minutes_are_another_post(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.rollout.atropos.service.SAME_POST_S", 0.05)
    client.begin(batch_size=4)
    client.join()
    client.put(seed=1)
    time.sleep(0.1)
    client.put(seed=1)
    assert client.get("/status")["queue_size"] == 2


# --- environments


def drained(client: Client, batches: int) -> Counter[int]:
    count: Counter[int] = Counter()
    for _ in range(batches):
        for each in client.get("/batch")["batch"]:
            count[each["env_id"]] += len(each["tokens"])
    return count


def test_weights_shape_batches(client: Client):
    client.begin(batch_size=8)
    heavy, light = client.join("heavy", weight=3.0), client.join("light", weight=1.0)
    for seed in range(40):
        client.put(env_id=light, seed=seed)
    for seed in range(40):
        client.put(env_id=heavy, seed=100 + seed)
    count = drained(client, 8)
    assert 0.68 < count[heavy] / sum(count.values()) < 0.82


def test_weights_count_sequences_not_groups(client: Client):
    client.begin(batch_size=16)
    large, small = client.join("large", 8), client.join("small", 2)
    for seed in range(24):
        client.put(env_id=large, size=8, seed=seed)
    for seed in range(96):
        client.put(env_id=small, size=2, seed=100 + seed)
    count = drained(client, 10)
    assert 0.4 < count[large] / sum(count.values()) < 0.6


def test_every_batch_holds_an_environments_minimum(client: Client):
    client.begin(batch_size=8)
    fast, slow = client.join("fast"), client.join("slow", min_batch_allocation=0.5)
    for seed in range(30):
        client.put(env_id=fast, seed=seed)
    assert client.get("/batch") == {"batch": None}  # it lives, and its half is not there yet
    for seed in range(6):
        client.put(env_id=slow, seed=100 + seed)
    for _ in range(3):
        count = drained(client, 1)
        assert (count[slow], count[fast]) == (4, 4)


def test_a_dead_environment_with_an_allocation_stops_nothing_once_it_lapsed(
    client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tandem.rollout.atropos.service.LAPSE_S", 1.0)
    client.begin(batch_size=4)
    fast = client.join("fast", lapse=60)
    client.put(env_id=fast, seed=1)
    client.put(env_id=fast, seed=2)
    dead = client.join("dead", min_batch_allocation=0.5)
    assert client.get("/batch") == {"batch": None}
    wait_until(lambda: client.get("/batch")["batch"] is not None)
    assert client.get("/status-env", {"env_id": fast})["unallocated_fraction"] == 1.0
    assert dead == 1


def test_minima_of_more_than_a_batch_are_cut_to_one(client: Client):
    client.begin(batch_size=8)
    first, second = client.join("a", min_batch_allocation=0.8), client.join("b", min_batch_allocation=0.8)
    for seed in range(8):
        client.put(env_id=first, seed=seed)
        client.put(env_id=second, seed=100 + seed)
    assert sequences(client.get("/batch")["batch"]) == 8
    assert client.get("/status-env", {"env_id": first})["unallocated_fraction"] == pytest.approx(0)


def test_a_post_that_comes_after_a_reset_is_not_another_environments(client: Client):
    client.begin(batch_size=4)
    assert [client.join(), client.join()] == [0, 1]
    client.put(env_id=1)
    assert client.http.get("/reset_data").text == "Reset successful"
    client.begin(batch_size=4)
    assert client.join() == 2
    late = client.send(encoded(env_id=1))
    assert (late.status_code, late.json()["error"]["field"]) == (422, "env_id")
    client.put(env_id=2)
    assert client.get("/status-env?env_id=2")["self_queue_size"] == 1


def test_records_are_written_one_after_the_other(tmp_path: Path):
    async def all_at_once() -> None:
        queue = RolloutQueue(tmp_path)
        atropos = Atropos(queue, tmp_path)
        try:
            await asyncio.gather(*(atropos.save() for _ in range(8)))
        finally:
            await queue.close()

    asyncio.run(all_at_once())
