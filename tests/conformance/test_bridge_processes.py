"""Trainer and engine apart, as they run: every copying bridge to another process, and either end killed or stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import (
    COLLECTIVES,
    COPYING,
    FILES,
    FILLED,
    as_served,
    bits,
    layout_of,
    meet,
    reply,
    struck_while_sending,
    weights_of,
)

from forked import forked_programs
from stopwatch import Stopwatch
from tandem.bridge.collective.sender import BroadcastBridge
from tandem.errors import SyncError, SyncTimeout
from tandem.protocols import WeightBridge, WeightSource
from tandem.types import Weights

ENDS = Path(__file__).with_name("bridge_ends.py")


class End:
    """A process at the other end."""

    def __init__(self) -> None:
        command = [sys.executable, str(ENDS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.pid = self.process.pid

    def say(self, what: str, argument: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, argument]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other end is gone: {self.process.wait()}"
        return json.loads(line)

    def ask(self, what: str, argument: Any) -> dict[str, Any]:
        self.say(what, argument)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def engine() -> Iterator[End]:
    """One that no test harms: it opens many links, one after the other. It has no imports but its own."""
    end = End()
    yield end
    end.end()


@pytest.fixture
def victim() -> Iterator[End]:
    with forked_programs():
        end = End()
    yield end
    end.end()


def carried(bridge: WeightBridge, engine: End, weights: Weights) -> dict[str, Any]:
    engine.say("receive", weights.version)
    bridge.send(weights)
    return engine.hear()


def goes_on_with(bridge: WeightBridge, source: WeightSource, engine: End, version: int) -> None:
    engine.ask("open", dict(source.link))
    assert carried(bridge, engine, weights_of(version, bridge.carries))["bits"] == bits(
        as_served(bridge.carries, version)
    )


@pytest.mark.parametrize("name", COPYING)
def test_another_process_gets_every_version_to_the_bit(name: str, engine: End, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 20.0)
    source = meet(bridge)
    engine.ask("open", json.loads(json.dumps(dict(source.link))))
    for version in (1, 2, 5):
        answer = carried(bridge, engine, weights_of(version, bridge.carries))
        assert answer["bits"] == bits(as_served(bridge.carries, version))
        assert bool(answer["path"]) == (name in FILES)
    bridge.close()


def test_an_engines_end_imports_nothing_that_other_environments_lack(engine: End, tmp_path: Path) -> None:
    for name, make in COPYING.items():
        bridge = make(tmp_path / name, 5.0) if (tmp_path / name).mkdir() is None else None
        assert bridge is not None
        modules = engine.ask("open", dict(bridge.source().link))["modules"]
        bridge.close()
    allowed = {"", ".errors", ".types", ".protocols", ".ops", ".io", ".bridge", ".vllm_worker"}
    helpers = (
        "batched_launches",
        "device_names",
        "digest",
        "digest_layout",
        "named_tensors",
        "option_report",
        "parts",
        "phase_timer",
    )
    allowed |= {f".ops.{name}" for name in helpers} | {".spec", ".spec.bridges", ".vllm_worker.weight_sources"}
    allowed |= {".io.bounded_json", ".io.safetensors_format"}
    allowed |= {f".bridge.{folder}" for folder in ("collective", "common", "files", "shared")}
    collective = ("control_channel", "prefetch", "process_group", "receiver", "shared_buffers")
    allowed |= {f".bridge.collective.{name}" for name in collective}
    allowed |= {f".bridge.common.{name}" for name in ("deadline", "manifest", "packer")}
    allowed |= {f".bridge.files.{name}" for name in ("parallel_io", "reader")}
    allowed |= {f".bridge.shared.{name}" for name in ("cuda_ipc", "memory")}
    assert {module.removeprefix("tandem") for module in modules} - allowed == set()


def test_tensors_larger_than_a_bucket_and_than_what_the_kernel_holds(engine: End, tmp_path: Path) -> None:
    large = {"q.weight": torch.randn(4096, 2048), "flat": torch.arange(3_000_001, dtype=torch.float32)}
    bridge = BroadcastBridge(bucket_bytes=2**20 + 5, deadline_s=30)
    source = bridge.source(1)
    source.attached({"boot_id": "engine-1", "layout": layout_of(large)})
    engine.ask("open", dict(source.link))
    assert carried(bridge, engine, weights_of(1, "full", large))["bits"].keys() == large.keys()
    bridge.close()


# --- the engine's process is killed or stopped


LARGE = {f"layer {n}": torch.full((2**21,), float(n)) for n in range(4)}
"""More than the kernel takes off a sender's hands, so the collective itself has to wait."""


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_lost_engine_is_an_error_in_time_and_another_one_is_taken(
    name: str, strike: signal.Signals, engine: End, victim: End, tmp_path: Path
) -> None:
    large = name == "broadcast"  # COPYING's is for small tensors
    for deadline_s in (1.5, 6.0):
        bridge = (
            BroadcastBridge(bucket_bytes=2**22, deadline_s=deadline_s) if large else COPYING[name](tmp_path, deadline_s)
        )
        source = bridge.source()
        source.attached({"boot_id": "engine-1", "layout": layout_of(LARGE)} if large else reply())
        weights = weights_of(1, bridge.carries, LARGE if large else None)
        victim.ask("open", dict(source.link))
        victim.say("receive", 1)
        with Stopwatch() as watch, pytest.raises(SyncTimeout if strike == signal.SIGSTOP else SyncError) as lost:
            bridge.send(struck_while_sending(weights, name, partial(os.kill, victim.pid, strike)))
        assert watch.seconds < deadline_s + 3.5
        if name == FILLED or "did not come" not in str(lost.value):
            break
        victim.hear()  # a busy machine did not bring it here in time, and nobody was struck
    assert re.search("not come" if name == FILLED else "was not taken|not confirm", str(lost.value)), lost.value
    with Stopwatch() as watch:
        if name != FILLED:
            with pytest.raises(SyncError, match="this connection has ended"):
                bridge.send(weights)
        goes_on_with(bridge, meet(bridge), engine, 1)
    assert watch.seconds < 5
    bridge.close()


def test_a_meeting_can_be_given_up_in_the_middle_of_a_transfer(engine: End, victim: End) -> None:
    """Whoever knows that the engine is gone need not wait for the deadline; nor does the interpreter stand still."""
    bridge = BroadcastBridge(bucket_bytes=2**22, deadline_s=30.0)
    source = bridge.source()
    source.attached({"boot_id": "engine-1", "layout": layout_of(LARGE)})
    struck = threading.Event()

    def strike() -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        struck.set()

    with ThreadPoolExecutor(1) as threads:
        victim.ask("open", dict(source.link))
        victim.say("receive", 1)
        answer = threads.submit(bridge.send, struck_while_sending(weights_of(1, "full", LARGE), "broadcast", strike))
        assert struck.wait(10)
        time.sleep(0.3)
        with Stopwatch() as watch:
            goes_on_with(bridge, meet(bridge), engine, 1)
            with pytest.raises(SyncError, match="given up"):
                answer.result(timeout=10)
        assert watch.seconds < 5
    bridge.close()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_engine_that_was_stopped_before_it_came_is_an_error_in_time(name: str, victim: End, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 1.0)
    source = meet(bridge)
    victim.ask("open", dict(source.link))
    os.kill(victim.pid, signal.SIGSTOP)
    victim.say("receive", 1)
    with pytest.raises(SyncTimeout, match=r"receiver 0 did not come within 1 s"):
        bridge.send(weights_of(1, bridge.carries))
    os.kill(victim.pid, signal.SIGCONT)  # the meeting goes on: nothing had begun
    answer = victim.hear()
    assert answer["error"] == "SyncTimeout"
    assert carried(bridge, victim, weights_of(2, bridge.carries))["bits"] == bits(as_served(bridge.carries, 2))
    bridge.close()


@pytest.mark.parametrize("name", FILES)
def test_files_need_no_engine_to_be_written(name: str, engine: End, tmp_path: Path) -> None:
    bridge = COPYING[name](tmp_path, 5.0)
    source = meet(bridge)
    bridge.send(weights_of(1, bridge.carries))
    engine.ask("open", dict(source.link))
    assert engine.ask("receive", 1)["bits"] == bits(as_served(bridge.carries, 1))
    bridge.close()


# --- the trainer's process is killed or stopped


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_lost_trainer_is_an_error_in_time_and_another_one_is_met(
    name: str, strike: signal.Signals, engine: End, victim: End, tmp_path: Path
) -> None:
    victim.ask("make", [name, str(tmp_path), 2.0])
    engine.ask("open", victim.ask("meet", None)["link"])
    engine.say("receive", 1)
    victim.say("send", [1, 0])
    assert "bits" in engine.hear()
    victim.hear()
    engine.say("receive", 2)
    victim.say("send", [2, strike])
    answer = engine.hear()
    assert answer["error"] in ("SyncError", "SyncTimeout")
    assert answer["seconds"] < 5
    nothing_begun = "a partner was lost|was not sent within"
    assert re.search(nothing_begun if name == FILLED else "has ended", engine.ask("receive", 3)["text"])
    bridge = COPYING[name](tmp_path, 10.0)
    goes_on_with(bridge, meet(bridge), engine, 2)
    bridge.close()


@pytest.mark.parametrize("name", ["disk", "adapter"])
def test_a_trainer_killed_while_it_writes_leaves_no_version(
    name: str, engine: End, victim: End, tmp_path: Path
) -> None:
    victim.ask("make", [name, str(tmp_path), 1.0])
    engine.ask("open", victim.ask("meet", None)["link"])
    victim.say("send", [1, 0])
    assert "bits" in engine.ask("receive", 1)
    victim.hear()
    engine.say("receive", 2)
    victim.say("send", [2, signal.SIGKILL])
    answer = engine.hear()
    assert (answer["error"], answer["seconds"] < 4) == ("SyncTimeout", True)
    assert victim.process.wait(5) == -signal.SIGKILL
    bridge = COPYING[name](tmp_path, 10.0)
    assert len(list(tmp_path.glob("*/tandem-weights-*"))) == 1  # what was left is gone
    goes_on_with(bridge, meet(bridge), engine, 2)
    bridge.close()


def test_a_trainer_that_is_stopped_while_the_engine_waits_is_an_error_in_time(
    engine: End, victim: End, tmp_path: Path
) -> None:
    victim.ask("make", ["broadcast", str(tmp_path), 1.0])
    engine.ask("open", victim.ask("meet", None)["link"])
    engine.say("receive", 0)
    victim.ask("send", [0, 0])
    assert "bits" in engine.hear()
    os.kill(victim.pid, signal.SIGSTOP)
    answer = engine.ask("receive", 1)
    assert (answer["error"], answer["seconds"] < 4) == ("SyncTimeout", True)


def test_strikes_at_many_instants_leave_the_right_version_or_an_error(engine: End, tmp_path: Path) -> None:
    """The engine's process is stopped some milliseconds after the sender began, and goes on a little later."""
    bridge = BroadcastBridge(bucket_bytes=2**20, deadline_s=0.8)
    tensors = {"q.weight": torch.randn(2048, 2048)}
    outcomes: list[str] = []
    for attempt in range(8):
        source = bridge.source()
        source.attached({"boot_id": "engine-1", "layout": {"q.weight": ["float32", [2048, 2048]]}})
        engine.ask("open", dict(source.link))
        engine.say("receive", attempt)

        def strike(after_s: float, for_s: float) -> None:
            time.sleep(after_s)
            os.kill(engine.pid, signal.SIGSTOP)
            time.sleep(for_s)
            os.kill(engine.pid, signal.SIGCONT)

        with ThreadPoolExecutor(1) as threads:
            struck = threads.submit(strike, 0.01 * attempt, 0.05 if attempt % 2 else 1.0)
            with Stopwatch() as watch:
                try:
                    bridge.send(weights_of(attempt, "full", tensors))
                    outcomes.append("sent")
                except SyncError as error:
                    outcomes.append(type(error).__name__)
            assert watch.seconds < 3
            struck.result()
        answer = engine.hear()
        assert answer.get("bits", bits(tensors)) == bits(tensors)
        assert "bits" in answer or outcomes[-1] != "sent", answer
    bridge.close()
    assert "sent" in outcomes
    assert len(outcomes) == 8
