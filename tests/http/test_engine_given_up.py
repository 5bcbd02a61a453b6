"""Loads that were given up, wakes that failed and torn weights in vLLM: what the engine answers afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import LINK, EngineServed, FakeEnd, FakeEngine, engine_serving
from served import wait_until
from test_engine_sleep import Vllm, end, engine_on, run

from tandem.errors import EngineError, EngineLost, SyncError
from tandem.serve.engine import weight_control
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

ONE = {"prompt_ids": [1], "sampling": {"max_tokens": 1}}
ENDS = ("the deadline", "hanging up", "another trainer")


class AdapterEnd(FakeEnd):
    carries = "adapter"


def serving(engine: Any, tmp_path: Path, **options: Any) -> Any:
    return engine_serving(engine, Renderer(byte_tokenizer()), tmp_path, **options)


@pytest.fixture
def vllm() -> Vllm:
    """The process below the engine that is `served`."""
    return Vllm()


@pytest.fixture
def served(vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineServed]:
    monkeypatch.setattr(weight_control, "WAKE_AGAIN_S", 0.05)
    with serving(engine_on(vllm), tmp_path) as made:
        yield made


def give_up(served: EngineServed, vllm: Vllm, how: str) -> None:
    """A load of version 4, of which the worker has more to say when nobody waits for it any more."""
    caller = served.attach(owner="a")
    vllm.go_on.clear()
    load = {"version": 4, "deadline_s": 30} | caller
    if how == "hanging up":
        served.hang_up("load", load, when=lambda: "tandem_load" in vllm.calls)
        served.soon(vllm.go_on.set)
        return
    loading = served.in_background("load", load)
    wait_until(lambda: "tandem_load" in vllm.calls)
    if how == "another trainer":
        heir = served.in_background("attach", {"link": LINK, "owner": "b"})
        wait_until(lambda: served.status()["attachment"] == 2)
        served.soon(vllm.go_on.set)
        assert heir.wait().status_code == 200
    else:
        served.later(30)
        served.soon(vllm.go_on.set)
    code = "fenced" if how == "another trainer" else "sync_timeout"
    assert loading.wait().json()["error"]["code"] == code


@pytest.mark.parametrize("how", ENDS)
def test_a_load_that_was_given_up_before_a_byte_was_written_leaves_the_version_before(
    served: EngineServed, vllm: Vllm, how: str
):
    vllm.load_fails = "nobody came"
    give_up(served, vllm, how)
    assert '"version":3' in served.in_background("generate", ONE).wait().text
    assert served.status()["state"] == "serving"


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("found", [{"untouched": False}, {"held": 4}], ids=["in one worker", "by some of them"])
def test_one_that_was_written_in_part_answers_nobody(served: EngineServed, vllm: Vllm, how: str, found: dict[str, Any]):
    vllm.load_fails = "the other end is gone"
    vars(vllm).update(found)
    give_up(served, vllm, how)
    wait_until(lambda: served.status()["state"] == "torn")
    assert "the other end is gone" in served.status()["why"]
    answer = served.post("generate", ONE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
    assert httpx.get(f"{served.url}/health").status_code == 503
    vllm.load_fails = ""
    assert served.post("load", {"version": 5} | served.attach(owner="b")).status_code == 200
    assert served.status()["state"] == "serving"
    assert '"version":5' in served.post("generate", ONE).text


def test_one_that_was_written_whole_is_served_under_its_number(served: EngineServed, vllm: Vllm):
    give_up(served, vllm, "hanging up")
    assert '"version":4' in served.post("generate", ONE).text
    assert served.status()["version"] == 4


def test_requests_that_wait_for_a_load_that_tears_are_told_so(served: EngineServed, vllm: Vllm):
    caller = served.attach()
    vllm.load_fails, vllm.untouched = "the other end is gone", False
    vllm.go_on.clear()
    loading = served.in_background("load", {"version": 4} | caller)
    wait_until(lambda: "tandem_load" in vllm.calls)
    waiting = served.in_background("generate", ONE)
    wait_until(lambda: served.status()["running"] == 1)
    served.soon(vllm.go_on.set)
    assert loading.wait().status_code == 409
    assert (waiting.wait().status_code, waiting.wait().json()["error"]["code"]) == (503, "engine_lost")


def test_a_trainer_that_gives_up_twice_does_not_leave_it_shut():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        vllm.load_s, vllm.load_fails = 0.2, "nobody came"
        load = asyncio.ensure_future(engine.load(4))
        for _ in range(3):
            await asyncio.sleep(0.05)
            load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert (await engine.generate([1], Sampling(max_tokens=1))).versions == [3]

    run(work())


def test_where_the_trainer_writes_a_failed_load_lets_nobody_speak_before_somebody_has_looked():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end("live"))
        await engine.sleep()
        waiting = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=1)))
        vllm.load_fails = "the trainer is gone"
        with pytest.raises(SyncError, match="the trainer is gone"):
            await engine.load(4)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).versions == [3]

    run(work())


# --- adapters stand upon what is torn


def test_an_adapter_does_not_mend_torn_weights():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        vllm.load_fails, vllm.untouched = "the other end is gone", False
        with pytest.raises(SyncError):
            await engine.load(4)
        vllm.load_fails = ""
        await engine.attach(end("adapter"))
        with pytest.raises(SyncError, match="an adapter cannot repair its base"):
            await engine.load(5)
        with pytest.raises(EngineLost, match="the other end is gone"):
            await engine.generate([1], Sampling(max_tokens=1))
        await engine.attach(end())
        await engine.load(6)
        assert (await engine.generate([1], Sampling(max_tokens=1))).versions == [6]

    run(work())


def test_nor_does_one_mend_what_a_trainer_tore(tmp_path: Path):
    engine = FakeEngine()
    with serving(engine, tmp_path, open_source=AdapterEnd) as served:
        served.post("sleep", {"lease_s": 30, "writing": True} | served.attach())
        engine.whole = False
        served.later(30)
        wait_until(lambda: served.status()["state"] == "torn")
        answer = served.post("load", {"version": 4} | served.attach())
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "sync")
        assert served.status()["state"] == "torn"


# --- wakes that fail


class WakesLate(FakeEngine):
    """Its first wakes fail with what is no EngineError."""

    failures = 2

    async def wake(self) -> None:
        if self.failures:
            self.failures -= 1
            raise SyncError("layout: what is derived is not what it was")
        await super().wake()


@pytest.mark.parametrize("after", ["its lease", "a load that failed"])
def test_whatever_keeps_an_engine_from_waking_is_tried_again(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_control, "WAKE_AGAIN_S", 0.05)
    engine = WakesLate()
    with serving(engine, tmp_path) as served:
        caller = served.attach()
        served.post("sleep", {"lease_s": 30} | caller)
        if after == "its lease":
            served.later(30)
        else:
            engine.fails = SyncError("nobody came")
            assert served.post("load", {"version": 4} | caller).status_code == 409
        wait_until(lambda: served.status()["state"] == "serving")
        assert not engine.failures
        assert engine.awake.is_set()


def test_weights_that_nobody_could_look_at_after_a_sleep_never_answer():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        await engine.sleep()
        waiting = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=1)))
        await asyncio.sleep(0)
        vllm.unseen = "layout: derived cos_sin_cache is not what it was"
        with pytest.raises(SyncError, match="cos_sin_cache"):
            await engine.wake()
        await engine.wake()
        for asked in (waiting, engine.generate([1], Sampling(max_tokens=1))):
            with pytest.raises(EngineError, match="cos_sin_cache"):
                await asked
        assert "cos_sin_cache" in engine.why_torn

    run(work())


def test_its_server_says_that_they_are_torn_and_its_lease_does_not_open_it(served: EngineServed, vllm: Vllm):
    vllm.unseen = "layout: derived cos_sin_cache is not what it was"
    served.post("sleep", {"lease_s": 30} | served.attach())
    waiting = served.in_background("generate", ONE)
    wait_until(lambda: served.status()["running"] == 1)  # a body that is still on its way would be cut by the clock
    served.later(30)
    wait_until(lambda: served.status()["state"] == "torn")
    assert waiting.wait().status_code == 503
    served.later(30)
    assert "cos_sin_cache" in served.status()["why"]
    assert served.post("generate", ONE).status_code == 503
    assert served.post("load", {"version": 4} | served.attach()).status_code == 200
    assert '"version":4' in served.post("generate", ONE).text
