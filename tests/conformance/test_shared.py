"""The single copy: two processes, one memory, and every handle that leads elsewhere refused."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stopwatch import Stopwatch
from tandem.bridge.shared.memory import Segment
from tandem.bridge.shared.receiver import SharedEnd
from tandem.bridge.shared.sender import SharedBridge
from tandem.errors import SyncError, SyncTimeout
from tandem.ops.digest import piece
from tandem.types import Weights

TENSORS = {
    "weight": torch.arange(35.0).reshape(5, 7),
    "narrow": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "half": torch.ones(3, dtype=torch.float16),
    "count": torch.tensor([1, 2, 3]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
}

# The engine's process: answers each line of JSON with one.
ENGINE = """
import json, sys, torch
from tandem.vllm_worker.weight_sources import open_source
from tandem.ops.digest import piece
tensors = None
for line in sys.stdin:
    what, argument = json.loads(line)
    try:
        if what == "attach":
            source = open_source(argument)
            shapes = {"weight": (5, 7), "scalar": ()}
            mine = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
            tensors = source.memory_for(mine)
            for name in mine:
                tensors[name].copy_(mine[name])
            source.attached({"boot_id": "there"})
            answer = source.reply
        else:
            weights = source.receive(argument)
            answer = {"version": weights.version, "expected": dict(weights.expected),
                      "digests": {name: piece(tensor, name) for name, tensor in tensors.items()}}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


class Engine:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, argument: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, argument]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def engine() -> Generator[Engine]:
    there = Engine()
    yield there
    there.end()


def meet(engine: Engine, deadline_s: float = 5.0) -> SharedBridge:
    bridge = SharedBridge(deadline_s)
    source = bridge.source()
    source.attached(engine.ask("attach", json.loads(json.dumps(source.link))))
    return bridge


def weights(version: int, tensors: Any) -> Weights:
    return Weights(version, "live", lambda: iter(tensors.items()))


def here(deadline_s: float = 0.2, *, digest: bool = False) -> tuple[SharedBridge, Any]:
    """Both ends in this process."""
    bridge = SharedBridge(deadline_s, digest=digest)
    source = bridge.source()
    end = SharedEnd(source.link)
    for name, home in end.memory_for(TENSORS).items():
        home.copy_(TENSORS[name])
    end.attached({"boot_id": "here"})
    source.attached(json.loads(json.dumps(end.reply)))
    return bridge, end


def test_what_one_process_writes_the_other_serves_and_both_name_the_same_memory(engine: Engine) -> None:
    bridge = meet(engine)
    storage = bridge.storage()
    assert storage is not None
    assert torch.equal(storage["weight"], torch.full((5, 7), 7.0))
    for version in (3, 4):
        storage["weight"].copy_(torch.randn(5, 7))
        storage["scalar"].fill_(version)
        sent = bridge.send(weights(version, storage))
        served = engine.ask("receive", version)
        assert served["version"] == version
        assert served["expected"] == sent.fingerprints
        assert served["digests"] == {name: piece(tensor, name) for name, tensor in storage.items()}
    assert (sent.bytes_moved, sent.how) == (0, "identity")


def test_asked_for_digests_both_ends_read_back_what_lies_there() -> None:
    bridge, end = here(digest=True)
    storage = bridge.storage()
    assert storage is not None
    proofs: list[Any] = []
    for version in (1, 2):
        storage["weight"].fill_(version)
        sent = bridge.send(weights(version, storage))
        assert end.receive(version).expected == sent.fingerprints
        proofs.append(sent.fingerprints)
    odd = [name for name in proofs[0] if proofs[0][name] != proofs[1][name]]
    assert odd == ["weight"]
    assert set(sent.seconds) == {"gather", "hash"}


def test_a_digest_sees_memory_that_only_says_that_it_is_the_trainers() -> None:
    bridge, end = here(digest=True)
    storage = bridge.storage()
    assert storage is not None
    end._tensors = {**end._tensors, "weight": end._tensors["weight"].clone()}
    storage["weight"].fill_(3)
    sent = bridge.send(weights(1, storage))
    theirs = end.receive(1).expected
    assert [name for name in theirs if theirs[name] != sent.fingerprints[name]] == ["weight"]


def test_every_type_and_shape_is_bit_equal_on_both_sides() -> None:
    bridge, end = here()
    storage = bridge.storage()
    assert storage is not None
    assert storage.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (storage[name].dtype, storage[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(storage[name], tensor)
    sent = bridge.send(weights(1, storage))
    received = end.receive(1)
    assert dict(received.expected) == dict(sent.fingerprints)


def test_a_tensor_of_the_trainer_s_own_is_refused_before_the_version_is_announced() -> None:
    bridge, end = here()
    mixed = dict(bridge.storage() or {})
    mixed["weight"] = mixed["weight"].clone()
    with pytest.raises(SyncError, match="1 of the trainer's tensors are not in the engine's memory, as 'weight'"):
        bridge.send(weights(1, mixed))
    with pytest.raises(SyncTimeout):
        end.receive(1)


def test_a_version_that_was_not_announced_times_out_and_a_later_one_is_refused() -> None:
    bridge, end = here()
    with pytest.raises(SyncTimeout, match="version 2 was not announced"):
        end.receive(2)
    bridge.send(weights(3, bridge.storage()))
    with pytest.raises(SyncError, match="asked for version 2, announced is 3"):
        end.receive(2)
    assert end.receive(3).version == 3


def test_an_end_that_is_closed_waits_for_no_version_any_more() -> None:
    _, end = here(deadline_s=30.0)
    threading.Timer(0.1, end.close).start()
    told = "version 1 was not announced: this connection was given up"
    with Stopwatch() as watch, pytest.raises(SyncError, match=told):
        end.receive(1)
    assert watch.seconds < 5


def test_the_trainer_goes_on_when_the_engine_is_killed_and_meets_the_next_one(engine: Engine) -> None:
    bridge = meet(engine)
    storage = dict(bridge.storage() or {})
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
    storage["weight"].fill_(11.0)  # its memory lives as long as somebody maps it
    other = Engine()
    try:
        again = meet(other)
        new = again.storage()
        assert new is not None
        assert float(new["weight"][0, 0]) == 7.0
        new["weight"].copy_(storage["weight"])
        again.send(weights(5, new))
        assert other.ask("receive", 5)["digests"]["weight"] == piece(storage["weight"], "weight")
    finally:
        other.end()


def test_a_handle_of_a_dead_engine_is_refused(engine: Engine) -> None:
    bridge = SharedBridge()
    source = bridge.source()
    reply = engine.ask("attach", dict(source.link))
    engine.end()
    with pytest.raises(SyncError, match="cannot be opened"):
        source.attached(reply)


def test_a_handle_of_another_meeting_is_refused() -> None:
    bridge, end = here()
    with pytest.raises(SyncError, match="of another connection"):
        bridge.source().attached(end.reply)


def damage(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def apply(handle: dict[str, Any]) -> None:
        handle["tensors"]["weight"] |= changes

    return apply


def reused(handle: dict[str, Any]) -> None:
    """The number now belongs to somebody else's memory of the very same size."""
    other = Segment.create("f" * 32, TENSORS)
    handle["fd"] = other.handle["fd"]


DAMAGE = {
    "offset in the header": damage(offset=8),
    "offset before the beginning": damage(offset=-4096),
    "offset beyond the end": damage(offset=10**9),
    "shape beyond the end": damage(shape=[5_000_000, 7]),
    "stride beyond the end": damage(stride=[10**6, 1]),
    "negative stride": damage(stride=[-7, 1]),
    "offset between elements": damage(offset=4097),
    "unknown type": damage(dtype="object"),
    "no number": damage(offset="x"),
    "shape and stride of unlike length": damage(stride=[1]),
    "another size": lambda handle: handle.update(size=handle["size"] + 4096),
    "no descriptor": lambda handle: handle.update(fd=10**6),
    "no field": lambda handle: handle.pop("pid"),
    "no text as a number": lambda handle: handle.update(pid="1/../self"),
    "reused descriptor": reused,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_handle_is_refused_and_opens_nothing(kind: str) -> None:
    bridge, end = here()
    source = bridge.source()
    reply = copy.deepcopy(end.reply)
    reply["handles"]["meeting"] = source.link["meeting"]
    if kind != "reused descriptor":  # that one must be found out by what the memory says of itself
        segment = Segment.create(source.link["meeting"], TENSORS)
        reply["handles"] = copy.deepcopy(dict(segment.handle))
    DAMAGE[kind](reply["handles"])
    with pytest.raises(SyncError, match="shared memory: "):
        source.attached(reply)


def test_nothing_is_left_on_disk_and_the_memory_goes_with_its_last_user() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:tandem-weights")

    before = mapped()
    bridge, end = here()
    assert mapped() > before
    end.close()
    bridge.close()
    del bridge, end
    give_up = time.monotonic() + 5
    while mapped() > before and time.monotonic() < give_up:
        time.sleep(0.01)
    assert mapped() == before


def test_tensors_of_a_device_that_cannot_be_shared_are_refused() -> None:
    end = SharedEnd(SharedBridge().source().link)
    with pytest.raises(SyncError, match="tensors are on"):
        end.memory_for({"far": Tensor(torch.empty(2, device="meta"))})
