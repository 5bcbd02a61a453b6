"""An engine that lends its GPU's memory to the trainer: over a vLLM that keeps the books of one GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_served import EngineServed, FakeEnd, engine_serving
from served import wait_until

from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.errors import EngineError
from tandem.serve.engine import weight_control
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

GPU, ENGINE = 100, 60  # bytes: of them all, and of those that sleeping frees


class Vllm:
    """Stands where `vllm serve` is talked to. Touching weights that are not there ends it, as a GPU would."""

    why_not_found_again = why_not_in_bulk = ""

    def __init__(self, device: str = "cuda") -> None:
        self.options = VllmOptions("model", "python", device=device, sleeps=True, adapter_slots=2)
        self.taken = 0
        """By the trainer."""
        self.mapped, self.weights, self.remembered = ENGINE, "v0", ""
        self.running, self.calls, self.refuses = True, list[str](), ""
        self.go_on = asyncio.Event()
        """Not set: neither falls asleep nor has more to say of a load."""
        self.go_on.set()
        self.load_s, self.load_fails, self.untouched, self.held = 0.0, "", True, -1
        """How long a load takes, what ends it, and what is found then."""
        self.unseen = ""
        """Why weights cannot be looked at."""
        self.why_streamed = "tokens are streamed here"
        self.says = "a\u2028b"
        """The text of a token: to Python, two lines."""

    async def post(self, path: str, body: Any = None, *, deadline_s: float, **query: str) -> Any:
        name = body["method"] if path == "/collective_rpc" else path
        name += f" {query['mode']}" if path == "/pause" else ""
        self.calls.append(name)
        if name == self.refuses:
            raise EngineError(f"engine: vLLM answers {name} with 500")
        match name:
            case "/sleep":
                await self.go_on.wait()
                self.mapped = 0
            case "/wake_up":
                if self.mapped or self.taken + ENGINE > GPU:
                    self.running = False
                self.mapped = ENGINE
            case "tandem_free_bytes":
                return {"results": [{"free": GPU - self.taken - self.mapped}]}
            case "/pause keep" | "/resume" | "/reset_prefix_cache" | "/v1/load_lora_adapter":
                return {}
            case "tandem_status":
                return {"results": [{"untouched": self.untouched, "version": self.held}]}
            case "tandem_load" if self.load_s or self.load_fails or not self.go_on.is_set():
                await asyncio.sleep(self.load_s)
                await self.go_on.wait()
                if self.load_fails:
                    return {"results": [{"error": {"code": "sync_timeout", "message": self.load_fails}}]}
                return {"results": [self._worker(name, *body["args"])]}
            case "tandem_intact" if self.unseen:
                return {"results": [{"error": {"code": "sync", "message": self.unseen}}]}
            case _:
                self._touch()
                return {"results": [self._worker(name, *body["args"])]}

    def _worker(self, method: str, *args: Any) -> Mapping[str, Any]:
        pieces = {"pieces": [["w", 0, 2, 0, 2, 255]], "shapes": {"w": [2, 2]}}
        match method:
            case "tandem_remember":
                self.remembered = self.weights
            case "tandem_intact":
                return {"intact": self.weights == self.remembered}
            case "tandem_keep":
                return {"why_not": self.why_streamed}
            case "tandem_attach":
                return {"layout": {"w": ["float32", [2, 2]]}, "places": [], "device": "cuda:0", "why_not": {}}
            case "tandem_load":
                self.weights, self.held, self.untouched = f"v{args[0]}", args[0], True
                return {"seconds": {"apply": 0.01}, "arrived": True, "adapter": "a", "loaded": False, **pieces}
            case "tandem_stage":
                return {"arrived": True}
        return pieces

    def _touch(self) -> None:
        self.running = self.running and bool(self.mapped)
        assert self.running, "an illegal memory access"

    @asynccontextmanager
    async def stream(self, path: str, body: Any, *, urgent: bool) -> AsyncIterator[Any]:
        self._touch()

        async def pieces() -> AsyncIterator[bytes]:
            told = [{"token": self.says, "logprob": -0.5}]
            choice = {"token_ids": [7], "logprobs": {"content": told}, "finish_reason": "length"}
            event = f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
            yield event[:40]
            yield event[40:]

        yield SimpleNamespace(status=200, pieces=pieces)

    async def end(self) -> None:
        self.running = False

    async def close(self) -> None: ...


def engine_on(vllm: Vllm, on_update: Any = "auto") -> VllmEngine:
    process: Any = vllm
    engine = VllmEngine(process, end_ids=frozenset(), num_ids=0, on_update=on_update, version=3)
    engine._exchange.boot_id = "boot-a"
    return engine


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def end(carries: str = "full") -> Any:
    made = FakeEnd({"mode": "disk", "deadline_s": 5.0})
    made.carries = carries
    return made


@pytest.fixture
def served(vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineServed]:
    monkeypatch.setattr(weight_control, "WAKE_AGAIN_S", 0.05)
    renderer = Renderer(byte_tokenizer())
    with engine_serving(engine_on(vllm), renderer, tmp_path) as made:
        yield made


@pytest.fixture
def vllm() -> Vllm:
    """The process below the engine that is `served`."""
    return Vllm()


# --- the engine


def test_before_its_memory_is_free_all_that_runs_has_ended_for_vllm_s_sleep_keeps_no_request():
    vllm = Vllm()
    engine = engine_on(vllm, "continue")

    async def work() -> None:
        with engine._exchange._gate.running("base", may_be_held=True):
            sleeping = asyncio.ensure_future(engine.sleep())
            await asyncio.sleep(0.05)
            assert not any(call.startswith("/") for call in vllm.calls)
        await sleeping

    run(work())
    assert [call for call in vllm.calls if call.startswith("/")] == ["/sleep"]


@pytest.mark.parametrize("asked", ["continue", "auto"])
def test_where_its_memory_stays_its_own_who_runs_is_held_while_it_sleeps(asked: Any):
    vllm = Vllm()
    vllm.options = replace(vllm.options, sleeps=False)
    engine = engine_on(vllm, asked)

    async def work() -> None:
        with engine._exchange._gate.running("base", may_be_held=True):
            await engine.sleep()
            await engine.wake()

    run(work())
    assert [call for call in vllm.calls if call.startswith("/")] == ["/pause keep", "/resume"]


@pytest.mark.parametrize("asked", ["continue", "auto"])
@pytest.mark.parametrize(
    ("carries", "mode", "sleeps", "keeps", "why_not"),
    [
        ("full", "disk", False, True, ""),
        ("adapter", "disk", False, True, "adapter"),
        ("full", "restart", False, True, "a new process"),
        ("full", "disk", True, True, "frees its memory"),
        ("full", "disk", False, False, "streamed"),
    ],
)
def test_a_trainer_is_told_whether_requests_under_way_are_held(
    carries: str, mode: str, sleeps: bool, keeps: bool, why_not: str, asked: Any
):
    """By itself (`auto`) an engine does the one or the other, and says which: a strict run takes both."""
    vllm = Vllm()
    vllm.options = replace(vllm.options, sleeps=sleeps)
    if keeps:
        vllm.why_streamed = ""
    source = end(carries)
    source.link = {"mode": mode, "deadline_s": 5.0}
    run(engine_on(vllm, asked).attach(source))
    told = source.reply["on_update"]
    assert (told["requested"], told["engaged"]) == (asked, asked == "auto" or not why_not)
    if asked == "auto":
        assert told["note"].startswith("finish, for" if why_not else "continue")
    assert why_not in told["note" if asked == "auto" else "why_not"]


@pytest.mark.parametrize("carries", ["full", "adapter"])
def test_its_memory_is_free_while_it_sleeps_and_back_before_a_version_comes(carries: str):
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end(carries))
        await engine.sleep()
        assert (vllm.mapped, engine.lent_bytes) == (0, ENGINE)
        waiting = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=1)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        served = await engine.load(4)
        assert served.lent_bytes == ENGINE
        assert "wake" in served.seconds
        assert (await waiting).versions == [4]
        assert engine.lent_bytes == 0

    run(work())
    slept = vllm.calls.index("/sleep")
    assert vllm.calls[slept - 2] == "tandem_remember"  # awake, with nothing running
    assert vllm.calls[slept:].index("/wake_up") < vllm.calls[slept:].index("tandem_load")


def test_weights_that_come_back_changed_serve_nothing_until_a_version_is_loaded():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        await engine.sleep()
        await engine.wake()
        assert (await engine.generate([1], Sampling(max_tokens=1))).versions == [3]
        await engine.sleep()
        vllm.weights = "noise"
        with pytest.raises(EngineError, match="changed while it slept"):
            await engine.wake()
        await engine.wake()
        with pytest.raises(EngineError, match="serves nothing until a version is loaded"):
            await engine.generate([1], Sampling(max_tokens=1))
        await engine.load(4)
        assert (await engine.generate([1], Sampling(max_tokens=1))).versions == [4]

    run(work())


def test_it_is_not_woken_where_there_is_no_room_and_the_error_says_what_to_set():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        await engine.sleep()
        vllm.taken = GPU - ENGINE + 1
        with pytest.raises(EngineError, match=r"engine\.memory_share"):
            await engine.load(4)
        with pytest.raises(EngineError, match="is asleep"):
            await engine.fingerprints()
        assert vllm.running
        vllm.taken = 0
        assert (await engine.load(4)).version == 4

    run(work())


def test_vllm_that_failed_halfway_to_wake_is_ended():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end())
        await engine.sleep()
        vllm.refuses = "/wake_up"
        with pytest.raises(EngineError, match="500"):
            await engine.wake()
        await engine.lost()

    run(work())


def test_without_sleep_mode_it_pauses_and_says_why():
    vllm = Vllm("cpu")
    engine, source = engine_on(vllm), end()

    async def work() -> None:
        await engine.attach(source)
        await engine.sleep()
        waiting = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=1)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).versions == [3]

    run(work())
    assert source.reply["sleep"]["requested"] == "free"
    assert not source.reply["sleep"]["engaged"]
    assert "CPU" in source.reply["sleep"]["why_not"]
    assert "/sleep" not in vllm.calls


def test_an_adapter_that_is_refused_while_it_sleeps_leaves_the_one_before_serving():
    vllm = Vllm()
    engine = engine_on(vllm)

    async def work() -> None:
        await engine.attach(end("adapter"))
        await engine.sleep()
        vllm.refuses = "tandem_load"
        with pytest.raises(EngineError, match="500"):
            await engine.load(4)
        assert (await engine.generate([1], Sampling(max_tokens=1))).versions == [3]

    run(work())


def test_vllm_is_asked_for_sleep_mode_where_it_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def arguments(**options: Any) -> list[str]:
        return VllmOptions("model", "python", **options).arguments(tmp_path / "socket", "0.26.0")

    assert "--enable-sleep-mode" in arguments(sleeps=True)
    assert "--enable-sleep-mode" not in arguments(sleeps=True, device="cpu")
    assert "--enable-sleep-mode" not in arguments()

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    environment = environment_of(VllmOptions("model", "python", sleeps=True), tmp_path / "a")
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment_of(VllmOptions("model", "python"), tmp_path / "b")


@pytest.mark.parametrize(
    ("version", "asked"),
    [("0.9.2", False), ("0.26.0", False), ("0.31.9+cpu", False), ("0.32.0rc1", True), ("0.100.0", True), ("1.0", True)],
)
def test_token_ids_are_asked_for_from_0_32_on(version: str, asked: bool, tmp_path: Path):
    arguments = VllmOptions("model", "python").arguments(tmp_path / "socket", version)
    assert ("--enable-scale-out" in arguments) == asked


def environment_of(options: VllmOptions, folder: Path) -> dict[str, str]:
    folder.mkdir()
    made = object.__new__(VllmProcess)
    made.options = options
    return made.environment(folder)


# --- its server


def test_the_answer_to_sleep_is_what_was_freed(served: EngineServed, vllm: Vllm):
    caller = served.attach()
    assert served.post("sleep", {**caller, "lease_s": 30.0}).json() == {"lent_bytes": ENGINE}
    assert served.post("sleep", {**caller, "lease_s": 30.0}).json() == {"lent_bytes": ENGINE}  # renewed
    assert (vllm.calls.count("tandem_remember"), vllm.calls.count("/sleep")) == (1, 1)
    assert not any(
        call.startswith("/pause") for call in vllm.calls
    )  # nothing runs behind the gate, so nothing has to be ended
    assert (served.status()["state"], served.status()["lent_bytes"]) == ("paused", ENGINE)
    loaded = served.post("load", {**caller, "version": 4}).json()
    assert (loaded["version"], loaded["lent_bytes"]) == (4, ENGINE)
    assert served.status()["lent_bytes"] == 0


def test_a_trainer_that_dies_does_not_leave_it_asleep_and_the_version_before_answers(served: EngineServed, vllm: Vllm):
    caller = served.attach()
    served.post("sleep", {**caller, "lease_s": 30})
    vllm.taken = GPU - 10  # its process is dead, and the driver has not yet noticed
    asking = served.in_background("generate", {"prompt_ids": [1], "sampling": {"max_tokens": 1}})
    wait_until(lambda: served.status()["running"] == 1)
    looks = vllm.calls.count("tandem_free_bytes")
    served.later(30)
    wait_until(lambda: vllm.calls.count("tandem_free_bytes") >= looks + 3)
    assert (served.status()["state"], served.status()["lent_bytes"]) == ("paused", ENGINE)
    assert asking.answer is None
    vllm.taken = 0
    assert '"version":3' in asking.wait().text
    wait_until(lambda: served.status()["state"] == "serving")
    assert vllm.running


def test_a_trainer_that_hangs_up_while_it_falls_asleep_leaves_it_a_lease(served: EngineServed, vllm: Vllm):
    caller = served.attach()
    vllm.go_on.clear()
    served.hang_up("sleep", {**caller, "lease_s": 30}, when=lambda: "/sleep" in vllm.calls)
    served.soon(vllm.go_on.set)
    wait_until(lambda: not vllm.mapped)
    served.later(30)
    wait_until(lambda: "/wake_up" in vllm.calls)  # a vLLM that did not sleep would die of it
    wait_until(lambda: served.status()["state"] == "serving")
    assert vllm.mapped == ENGINE
    assert vllm.running


def test_a_load_that_finds_no_room_leaves_it_asleep_under_its_lease(served: EngineServed, vllm: Vllm):
    caller = served.attach()
    served.post("sleep", {**caller, "lease_s": 30})
    vllm.taken = GPU
    assert "memory_share" in served.post("load", {**caller, "version": 4}).text
    assert served.status()["state"] == "paused"
    vllm.taken = 0
    served.later(30)
    wait_until(lambda: served.status()["state"] == "serving")
    assert served.status()["version"] == 3


def test_whoever_attaches_next_finds_it_awake(served: EngineServed, vllm: Vllm):
    served.post("sleep", {**served.attach(), "lease_s": 30.0})
    assert served.attach()["attachment"] == 2
    assert (served.status()["state"], vllm.mapped) == ("serving", ENGINE)
