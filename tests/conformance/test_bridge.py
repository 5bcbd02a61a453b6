"""What any WeightBridge must do. Both ends are in this process here; test_bridge_processes.py parts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import (
    BRIDGES,
    COLLECTIVES,
    COPYING,
    FILES,
    adapter_tensors,
    as_served,
    bits,
    carry,
    full_tensors,
    layout_of,
    meet,
    reply,
    tensors_for,
    weights_of,
    while_sending,
)

from stopwatch import Stopwatch
from tandem.bridge.collective import control_channel, receiver
from tandem.bridge.collective.receiver import buckets_of
from tandem.bridge.collective.sender import BroadcastBridge
from tandem.bridge.common import packer
from tandem.bridge.common.manifest import Manifest, Placement, TensorEntry
from tandem.errors import SyncError, SyncTimeout
from tandem.ops.digest import fingerprints
from tandem.protocols import WeightBridge, WeightSource
from tandem.serve.engine.link_rules import Allowed
from tandem.types import Weights
from tandem.vllm_worker.weight_sources import open_source


def _made(name: str, at: Path, deadline_s: float) -> Iterator[WeightBridge]:
    bridge = BRIDGES[name](at, deadline_s)
    assert bridge.mode == name.partition(" ")[0]
    yield bridge
    bridge.close()


@pytest.fixture(params=BRIDGES)
def bridge(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightBridge]:
    yield from _made(request.param, tmp_path, 10.0)


@pytest.fixture(params=COPYING)
def copying(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightBridge]:
    yield from _made(request.param, tmp_path, 10.0)


@pytest.fixture(params=COPYING)
def hasty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightBridge]:
    yield from _made(request.param, tmp_path, 0.3)


def test_its_link_is_one_that_an_engine_s_server_takes(bridge: WeightBridge) -> None:
    link = meet(bridge).link
    if link:
        Allowed(directories=(Path("/"),)).check({**link, "rank": 1})


def test_every_version_arrives_in_turn(bridge: WeightBridge) -> None:
    source = meet(bridge)
    assert source.carries == bridge.carries
    for version in range(4):
        sent, (received,) = carry(bridge, source, weights_of(version, bridge.carries))
        assert (sent.version, sent.mode) == (version, bridge.mode)
        assert (received.version, received.kind) == (version, bridge.carries)


def test_every_receiver_gets_every_version(bridge: WeightBridge) -> None:
    source = meet(bridge, num_receivers=3)
    for version in (1, 2):
        _, received = carry(bridge, source, weights_of(version, bridge.carries), ranks=(2, 0, 1))
        assert [each.version for each in received] == [version] * 3
        assert len({tuple(bits(each.tensors())) for each in received}) == 1


def test_weights_can_be_read_again_with_the_same_names(bridge: WeightBridge) -> None:
    _, (received,) = carry(bridge, meet(bridge), weights_of(1, bridge.carries))
    assert bits(received.tensors()) == bits(received.tensors())


def test_a_receiver_waits_for_the_sender(copying: WeightBridge) -> None:
    source = meet(copying)
    with ThreadPoolExecutor(1) as threads:
        with Stopwatch() as watch:
            answer = threads.submit(source.receive, 4)
            time.sleep(0.1)
            copying.send(weights_of(4, copying.carries))
            assert answer.result(timeout=5).version == 4
        assert watch.wall_s > 0.1
        assert watch.seconds < 5


# --- what a copy is


def test_what_arrives_is_what_is_to_be_served_to_the_bit(copying: WeightBridge) -> None:
    """Empty and 0-dim tensors, 16-bit and integer ones, slices and transposes, larger than a bucket and split by it."""
    sent, (received,) = carry(copying, meet(copying), weights_of(1, copying.carries))
    assert bits(received.tensors()) == bits(as_served(copying.carries, 1))
    assert sent.fingerprints == received.expected
    assert sent.bytes_moved >= sum(t.nbytes for t in as_served(copying.carries, 1).values())
    assert {"gather", "hash", "move"} <= sent.seconds.keys()


def test_sending_leaves_the_trainers_tensors_as_they_are(copying: WeightBridge) -> None:
    tensors = tensors_for(copying.carries)
    before = bits(tensors)
    carry(copying, meet(copying), weights_of(1, copying.carries, tensors))
    assert bits(tensors) == before


@pytest.mark.parametrize("name", [name for name in COPYING if name.startswith("adapter")])
def test_an_adapter_comes_to_where_the_one_before_lies_for_whoever_asked_for_that(name: str, tmp_path: Path) -> None:
    """As the very same tensors, with its own values; and elsewhere once names, shapes or types are others."""
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge)
    theirs = open_source(dict(source.link))
    assert theirs.reuse_buffer()

    def brought(weights: Weights) -> dict[str, torch.Tensor]:
        sent, (received,) = carry(bridge, theirs, weights)
        assert sent.fingerprints == received.expected
        return dict(received.tensors())

    first = brought(weights_of(1, "adapter"))
    second = brought(weights_of(2, "adapter"))
    assert all(second[name] is first[name] for name in first)
    assert bits(second) == bits(as_served("adapter", 2))
    wider = {name: torch.cat([tensor, tensor], 0) for name, tensor in adapter_tensors(3).items()}
    assert bits(brought(weights_of(3, "adapter", wider))) == bits(wider)
    assert bits(second) == bits(as_served("adapter", 2))
    source.attached(reply("engine-2") | {"adapter_dtype": "bfloat16"})
    narrow = {name: tensor.bfloat16() for name, tensor in wider.items()}
    assert bits(brought(weights_of(4, "adapter", wider))) == bits(narrow)
    assert bits(brought(weights_of(5, "adapter"))) == bits({n: t.bfloat16() for n, t in adapter_tensors(5).items()})
    bridge.close()


def test_places_that_were_told_apart_are_those_that_the_manifest_names() -> None:
    places = Placement.of({"a": ("float32", (2, 3)), "b": ("bfloat16", (5,))})
    assert Placement.from_text(places.text, places.checksum, "broadcast").tensors == places.tensors
    with pytest.raises(SyncError, match="is damaged"):
        Placement.from_text(places.text.replace("32", "16"), places.checksum, "broadcast")
    manifest = Manifest("broadcast", 1, "full", places.tensors, {"a": "0", "b": "1"}, size_bytes=places.size_bytes)
    text = manifest.to_text(places)
    read = Manifest.from_text(text, "broadcast", lambda checksum: {places.checksum: places}[checksum])
    assert (read.tensors, read.digests, read.version) == (manifest.tensors, manifest.digests, 1)
    short = replace(manifest, size_bytes=places.size_bytes - 1).to_text(places)
    with pytest.raises(SyncError, match="41 bytes, of 42"):
        Manifest.from_text(short, "broadcast", lambda _: places)
    odd = Placement({"a": TensorEntry("float32", (2,), 2)})
    with pytest.raises(SyncError, match="places 'a' at bytes 2 to 10 of 10"):
        Placement.from_text(odd.text, odd.checksum, "broadcast")


def test_what_arrived_stays_when_the_next_version_comes_and_when_all_is_closed(copying: WeightBridge) -> None:
    source = meet(copying)
    _, (first,) = carry(copying, source, weights_of(1, copying.carries))
    for version in (2, 3, 4, 5):
        carry(copying, source, weights_of(version, copying.carries))
    copying.close()
    assert bits(first.tensors()) == bits(as_served(copying.carries, 1))


@pytest.mark.parametrize("name", ["adapter", "adapter_broadcast"])
def test_an_adapters_configuration_comes_along_and_its_type_if_the_engine_has_one(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = bridge.source()
    source.attached({**reply(), "adapter_dtype": "float16"})
    _, (received,) = carry(bridge, source, weights_of(1, "adapter"))
    bridge.close()
    assert (received.adapter["r"], received.adapter["target_modules"]) == (4, ["q"])
    assert {tensor.dtype for _, tensor in received.tensors()} == {torch.float16}


def test_many_buckets_of_all_sizes_around_a_tensors_edge(tmp_path: Path) -> None:
    for bucket_bytes in (16, 48, 4096, 2**20):
        bridge = BroadcastBridge(bucket_bytes=bucket_bytes, deadline_s=20)
        _, (received,) = carry(bridge, meet(bridge), weights_of(1, "full"))
        assert bits(received.tensors()) == bits(as_served("full", 1)), bucket_bytes
        bridge.close()


# --- versions


def test_an_older_version_that_was_left_over_is_passed_over(copying: WeightBridge) -> None:
    source = meet(copying)
    if copying.mode in FILES:
        for version in (5, 6):
            copying.send(weights_of(version, copying.carries))
        _, (received,) = carry(copying, source, weights_of(7, copying.carries))
    else:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(source.receive, 7)
            with pytest.raises(SyncError, match="asked for version 7, sent was 6"):
                copying.send(weights_of(6, copying.carries))
            copying.send(weights_of(7, copying.carries))
            received = answer.result(timeout=10)
    assert bits(received.tensors()) == bits(as_served(copying.carries, 7))


def test_a_later_version_than_was_asked_for_is_refused(copying: WeightBridge) -> None:
    source = meet(copying)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 7)
        if copying.mode in FILES:
            copying.send(weights_of(8, copying.carries))
        else:
            with pytest.raises(SyncError, match="asked for version 7, sent was 8"):
                copying.send(weights_of(8, copying.carries))
        with pytest.raises(SyncError, match="asked for version 7, sent was 8"):
            answer.result(timeout=10)
    _, (received,) = carry(copying, source, weights_of(9, copying.carries))
    assert received.version == 9


def test_a_version_that_does_not_come_is_given_up_in_time(hasty: WeightBridge) -> None:
    source = meet(hasty)
    with Stopwatch() as watch, pytest.raises(SyncTimeout, match=r"version 7 was not sent within 0\.3 s"):
        source.receive(7)
    assert watch.seconds < 2


@pytest.mark.parametrize("name", COLLECTIVES)
def test_receivers_that_do_not_come_are_named_and_may_come_for_the_next(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 1.5)
    source = meet(bridge, num_receivers=3)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(source.receive, 1, 1)
        with pytest.raises(SyncTimeout, match=r"for version 1, receivers 0, 2 did not come within 1\.5 s"):
            bridge.send(weights_of(1, bridge.carries))
    _, received = carry(bridge, source, weights_of(2, bridge.carries), ranks=(0, 1, 2))
    assert [each.version for each in received] == [2, 2, 2]
    bridge.close()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_receiver_without_a_place_is_refused(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 1.0)
    with pytest.raises(SyncError, match="receiver 1 is not part of this connection"):
        meet(bridge).receive(1, rank=1)
    bridge.close()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_who_would_come_waits_on_when_another_refuses(name: str, tmp_path: Path) -> None:
    """And not in a collective: the next announcement of the version is for it again."""
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge, num_receivers=2)
    with ThreadPoolExecutor(2) as threads:
        patient, other = threads.submit(source.receive, 1, 0), threads.submit(source.receive, 0, 1)
        with pytest.raises(SyncError, match="receiver 1: asked for version 0, sent was 1"):
            bridge.send(weights_of(1, bridge.carries))
        with pytest.raises(SyncError, match="asked for version 0, sent was 1"):
            other.result(timeout=5)
        other = threads.submit(source.receive, 1, 1)
        bridge.send(weights_of(1, bridge.carries))
        for answer in (patient, other):
            assert bits(answer.result(timeout=5).tensors()) == bits(as_served(bridge.carries, 1))
    bridge.close()


# --- meetings


def test_a_new_source_is_a_new_meeting(copying: WeightBridge) -> None:
    old = meet(copying)
    carry(copying, old, weights_of(1, copying.carries))
    new = meet(copying)
    with pytest.raises(SyncError, match=r"given up|ended|closed"):
        old.receive(1)
    _, (received,) = carry(copying, new, weights_of(1, copying.carries))  # the same version, to another engine
    assert bits(received.tensors()) == bits(as_served(copying.carries, 1))


def test_whoever_waits_at_a_meeting_that_is_given_up_stops_waiting(copying: WeightBridge) -> None:
    source = meet(copying)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 1)
        time.sleep(0.1)
        with Stopwatch() as watch:
            copying.source()
            with pytest.raises(SyncError):
                answer.result(timeout=10)
        assert watch.seconds < 3  # the deadline is 10 s


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_sender_that_waits_stops_when_the_meeting_is_given_up(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 20.0)
    meet(bridge)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(bridge.send, weights_of(1, bridge.carries))
        time.sleep(0.1)
        with Stopwatch() as watch:
            source = meet(bridge)
            with pytest.raises(SyncError, match="given up"):
                answer.result(timeout=10)
        assert watch.seconds < 3
    _, (received,) = carry(bridge, source, weights_of(2, bridge.carries))
    assert received.version == 2
    bridge.close()


FAILURES: dict[str, tuple[BaseException, type[BaseException]]] = {
    "no memory": (torch.OutOfMemoryError("CUDA out of memory"), SyncError),  # pyright: ignore[reportCallIssue]
    "a fault of ours": (KeyError("of the code itself"), KeyError),
    "stopped": (KeyboardInterrupt("stopped by hand"), KeyboardInterrupt),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at_the", ["trainer", "engine", "engine, when the trainer has sent all"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_whatever_goes_wrong_in_the_middle_of_a_transfer_ends_the_meeting_at_both_ends_at_once(
    name: str, at_the: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, as_what = FAILURES[failure]
    bridge = COPYING[name](tmp_path, 20.0)
    source = meet(bridge)
    carry(bridge, source, weights_of(1, bridge.carries))

    def fails(*_: object) -> None:
        raise raised

    def fails_in_the_middle(flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        first, *others = buckets_of(flat, size)
        yield from (first,) if at_the == "engine" else (first, *others)
        raise raised

    with Stopwatch() as watch, monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        if at_the == "trainer":
            patch.setattr(packer.Packer, "finish", fails)
            patch.setattr(packer.AdapterTensors, "hand_over", fails)
        else:
            patch.setattr(receiver, "buckets_of", fails_in_the_middle)
        answer = threads.submit(source.receive, 2)
        theirs, ours = (as_what, SyncError) if at_the == "trainer" else (SyncError, as_what)
        with pytest.raises(theirs):
            bridge.send(weights_of(2, bridge.carries))
        with pytest.raises(ours):
            answer.result(timeout=10)
        for verb in (lambda: source.receive(3), lambda: bridge.send(weights_of(3, bridge.carries))):
            with pytest.raises(SyncError, match="this connection has ended: "):
                verb()
    assert watch.seconds < 5
    _, (received,) = carry(bridge, meet(bridge), weights_of(4, bridge.carries))
    assert received.version == 4
    bridge.close()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_engine_is_told_that_a_meeting_is_over_even_if_its_store_lives_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that was left behind may hold the store for as long as it likes."""
    held: list[Any] = []

    class Held(control_channel.TCPStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            held.append(self)

    monkeypatch.setattr(control_channel, "TCPStore", Held)
    bridge = COPYING[name](tmp_path, 20.0)
    theirs = open_source(dict(meet(bridge).link))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(theirs.receive, 1)
        time.sleep(0.2)
        with Stopwatch() as watch:
            bridge.close()
            with pytest.raises(SyncError, match="the trainer closed this connection"):
                answer.result(timeout=10)
        assert watch.seconds < 5
    assert held


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_store_listens_on_the_loopback_interface_alone(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 5.0)
    port = f":{bridge.source().link['port']:04X}"
    listening = "0A"
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
    assert [row[1] for row in rows if row[1].endswith(port) and row[3] == listening] == [f"0100007F{port}"]
    bridge.close()


def test_one_receives_while_another_who_gave_up_still_waits(copying: WeightBridge) -> None:
    """An engine's call was cancelled, and its thread goes on waiting; the engine asks anew."""
    source = meet(copying)
    threads = [threading.Thread(target=lambda: source.receive(1), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    copying.send(weights_of(1, copying.carries))
    if copying.mode in COLLECTIVES:
        copying.send(weights_of(1, copying.carries))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_closed_bridge_sends_nothing(copying: WeightBridge) -> None:
    source = meet(copying)
    copying.close()
    with pytest.raises(SyncError, match="before source"):
        copying.send(weights_of(1, copying.carries))
    with pytest.raises(SyncError):
        source.receive(1)


# --- what is refused before anything moves


def nothing_was_sent(bridge: WeightBridge, source: WeightSource, version: int) -> bool:
    """And the meeting goes on."""
    _, (received,) = carry(bridge, source, weights_of(version + 1, bridge.carries))
    return received.version == version + 1


def test_without_an_engine_nobody_knows_what_to_send(copying: WeightBridge) -> None:
    copying.source()
    with pytest.raises(SyncError, match="no engine is attached"):
        copying.send(weights_of(1, copying.carries))


FULL_FAULTS = {
    "a name is missing": (lambda t: t.pop("half"), r"does not send 1 \('half'\)"),
    "a name is unknown": (lambda t: t.update({"more": torch.ones(2)}), r"sends 1 others \('more'\)"),
    "a name changed": (lambda t: t.update({"HALF": t.pop("half")}), r"not send 1 \('half'\).* 1 others \('HALF'\)"),
    "a shape differs": (
        lambda t: t.update({"half": torch.ones(32).half()}),
        r"'half' is \[32\] and is served as \[31\]",
    ),
    "of the same size": (lambda t: t.update({"brain": t["brain"].reshape(7, 5, 3)}), r"'brain' is \[7, 5, 3\]"),
    "numbers for integers": (
        lambda t: t.update({"count": torch.ones(11)}),
        "'count' is torch.float32 and is served as",
    ),
    "wider integers": (lambda t: t.update({"count": t["count"].int()}), "'count' is torch.int32"),
    "no number": (lambda t: t["brain"].view(-1)[3:4].fill_(float("nan")), "'brain' holds a value that is not finite"),
    "infinite below": (lambda t: t["half"][1:2].fill_(float("-inf")), "'half' holds a value"),
    "infinite": (lambda t: t["scalar"].fill_(float("-inf")), "'scalar' holds a value"),
    "too large for the served type": (
        lambda t: t.update({"half": torch.full((31,), 1e6)}),
        "'half' holds a value that is not finite, or does not fit torch.float16",
    ),
}


@pytest.mark.parametrize("fault", FULL_FAULTS)
@pytest.mark.parametrize("name", ["disk", "broadcast"])
def test_weights_that_are_not_what_is_served_are_refused_before_a_byte_moves(
    name: str, fault: str, tmp_path: Path
) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge)
    spoil, says = FULL_FAULTS[fault]
    tensors = full_tensors(1)
    spoil(tensors)
    with pytest.raises(SyncError, match=says):
        bridge.send(weights_of(1, "full", tensors))
    assert not list(tmp_path.rglob("v-000001*"))
    assert nothing_was_sent(bridge, source, 1)
    bridge.close()


@pytest.mark.parametrize("name", ["adapter", "adapter_broadcast"])
def test_an_adapter_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge)
    tensors = {key.replace(".q.", ".query."): tensor for key, tensor in tensors_for("adapter").items()}
    with pytest.raises(SyncError, match=r"base_model\.model\.query\.lora_A\.weight.* adapt no layer"):
        bridge.send(weights_of(1, "adapter", tensors))
    assert nothing_was_sent(bridge, source, 1)
    bridge.close()


def test_a_tensor_that_is_named_twice_is_refused(copying: WeightBridge) -> None:
    meet(copying)
    weights = weights_of(1, copying.carries)
    first = next(weights.tensors())
    twice = replace(weights, tensors=lambda: iter([first, *weights.tensors()]))
    with pytest.raises(SyncError, match=f"named '{first[0]}' twice"):
        copying.send(twice)


@pytest.mark.parametrize("name", ["disk", "broadcast"])
def test_engines_that_serve_different_things_are_refused(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge, num_receivers=2)
    other = reply("engine-2")
    other["layout"]["half"] = ["float32", [31]]
    source.attached(other)
    with pytest.raises(SyncError, match="engines engine-1 and engine-2 do not serve the same: 'half'"):
        bridge.send(weights_of(1, "full"))
    bridge.close()


def test_a_link_of_another_mode_is_refused(copying: WeightBridge) -> None:
    link = dict(copying.source().link)
    assert open_source(link).carries == copying.carries
    with pytest.raises(SyncError, match="both ends must be of one release"):
        open_source({**link, "deadline_s": "soon"})
    with pytest.raises(SyncError, match="both ends must use one sync"):
        type(open_source(link))({**link, "mode": "other"}, copying.mode, copying.carries)


# --- what is found on the other side


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_difference_between_what_was_announced_and_what_arrived_is_found(name: str, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 10.0)
    source = meet(bridge)
    tensors = tensors_for(bridge.carries, 1)
    spoiled = "brain" if bridge.carries == "full" else next(iter(tensors))
    lie = while_sending(
        weights_of(1, bridge.carries, tensors), name, lambda _, named, tensor: -tensor if named == spoiled else tensor
    )
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(source.receive, 1)
        with pytest.raises(SyncError, match=f"version 1 was refused: receiver 0: .*'{spoiled}' is not what was sent"):
            bridge.send(lie)
        with pytest.raises(SyncError, match=f"'{spoiled}' is not what was sent"):
            answer.result(timeout=10)
    assert nothing_was_sent(bridge, source, 1)
    bridge.close()


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name.startswith("adapter")])
def test_who_compares_adapters_where_they_are_served_gets_them_as_they_came(name: str, tmp_path: Path) -> None:
    """Nobody has looked at them on the way: `expected` is what they must be."""
    bridge = COPYING[name](tmp_path, 10.0)
    theirs = open_source(dict(meet(bridge).link))
    assert theirs.verify_where_served()
    spoiled = next(iter(tensors_for("adapter", 1)))
    lie = while_sending(weights_of(1, "adapter"), name, lambda _, named, t: -t if named == spoiled else t)
    sent, (received,) = carry(bridge, theirs, lie)
    assert sent.fingerprints == received.expected
    found = fingerprints(dict(received.tensors()))
    assert [each for each in found if found[each] != received.expected[each]] == [spoiled]
    bridge.close()


def test_layouts_speak_of_types_that_both_wires_know() -> None:
    assert {dtype for dtype, _ in layout_of(full_tensors(0)).values()} >= {"float32", "bfloat16", "int64", "bool"}
