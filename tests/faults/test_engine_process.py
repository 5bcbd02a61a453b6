"""An engine in a process of its own is killed, stopped and restarted, and its trainer gets on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_child_process import runs, wait_until

from leashed import programs_below
from stopwatch import Stopwatch
from tandem.engine.server import connection
from tandem.engine.server.child_process import Owned, OwnedProcess
from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.errors import EngineError, EngineLost, SyncError, TandemError
from tandem.types import Completion, Sampling, Weights

PROGRAM = str(Path(__file__).with_name("engine_program.py"))
LONG, SHORT = Sampling(max_tokens=500), Sampling(max_tokens=5)


class Source:
    """The trainer's end, as far as an engine sees it."""

    carries = "full"

    def __init__(self, directory: Path, mode: str = "disk") -> None:
        self.link: Mapping[str, Any] = {"mode": mode, "directory": str(directory), "deadline_s": 10.0}
        self.directory, self.replies = directory, list[Mapping[str, Any]]()

    def memory_for(self, tensors: Any) -> None:
        return None

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.replies.append(reply)

    def receive(self, version: int, rank: int = 0) -> Weights:
        return Weights(version, "full", lambda: iter(()), path=str(self.directory / f"v{version}"))

    def close(self) -> None:
        pass


def command(model: str, version: int, ready_file: Path) -> list[str]:
    return [sys.executable, PROGRAM, str(version), str(ready_file), str(ready_file.parent)]


def owned(directory: Path, **options: Any) -> ServerEngine:
    return ServerEngine(Owned(command, str(directory), directory, start_deadline_s=30, **options), deadline_s=10)


def pid_of(directory: Path) -> int:
    return json.loads((directory / "ready.json").read_text())["pid"]


def play(work: Callable[[], Any]) -> Any:
    async def go() -> Any:
        return await asyncio.wait_for(work(), 120)

    return asyncio.run(go())


@asynccontextmanager
async def closing(engine: ServerEngine) -> AsyncIterator[ServerEngine]:
    try:
        yield engine
    finally:
        await engine.close()


async def under_way(engine: ServerEngine, on_token: Any = None) -> asyncio.Task[Completion]:
    """A long request, of which tokens have come."""
    told = asyncio.Event()

    def tell(*token: Any) -> None:
        told.set()
        if on_token is not None:
            on_token(*token)

    task = asyncio.create_task(engine.generate([1], LONG, on_token=tell))
    await told.wait()
    return task


def test_a_killed_engine_is_lost_started_again_and_serves_what_is_loaded(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(owned(tmp_path, max_restarts=1)) as engine:
            source = Source(tmp_path)
            await engine.attach(source)
            await engine.load(7)
            first = source.replies[-1]["boot_id"]
            request, lost = await under_way(engine), asyncio.create_task(engine.lost())
            with Stopwatch() as watch:
                os.kill(pid_of(tmp_path), signal.SIGKILL)
                with pytest.raises(EngineLost, match="signal 9"):
                    await request
                await lost
            assert watch.seconds < 3
            with pytest.raises(EngineLost):
                await engine.generate([1], SHORT)
            await engine.attach(source)
            assert source.replies[-1]["boot_id"] != first
            assert engine.version == 0
            early = asyncio.create_task(engine.generate([1], SHORT))
            await asyncio.sleep(0.3)
            assert not early.done(), "what a fresh process has are other weights"
            served = await engine.load(8)
            assert served.engines == (source.replies[-1]["boot_id"],)
            assert (await early).versions == [8] * 5
            os.kill(pid_of(tmp_path), signal.SIGKILL)
            await engine.lost()
            with pytest.raises(EngineError, match=r"max_restarts = 1 restarts.*signal 9"):
                await engine.attach(source)

    play(work)


def test_an_event_loop_that_stands_still_is_no_lost_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BEAT_S", 0.4)
    monkeypatch.setattr(connection, "BEAT_TIMEOUT_S", 0.6)

    async def work() -> None:
        async with closing(owned(tmp_path)) as engine:
            await engine.attach(Source(tmp_path))
            await engine.load(7)
            for _ in range(5):
                await asyncio.sleep(0)
                time.sleep(0.7)  # a trainer that computes on this thread
            assert (await engine.generate([1], SHORT)).versions == [7] * 5

    play(work)


# --- somebody else's engine


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start_standing(tmp_path)
    yield process
    process.kill()
    process.wait()


def start_standing(directory: Path) -> subprocess.Popen[bytes]:
    (directory / "ready.json").unlink(missing_ok=True)
    process = subprocess.Popen(command("", 3, directory / "ready.json"), stdout=subprocess.DEVNULL)
    wait_until((directory / "ready.json").exists, 30)
    return process


def place(directory: Path, patience_s: float = 0.3) -> ExistingServer:
    ready = json.loads((directory / "ready.json").read_text())
    return ExistingServer(ready["url"], Path(ready["token_file"]), patience_s=patience_s)


async def idle_owned(directory: Path) -> None:
    async with closing(owned(directory)) as engine:
        await engine.attach(Source(directory))
        await engine.load(7)
        stopped = pid_of(directory)
        os.kill(stopped, signal.SIGSTOP)
        with Stopwatch() as watch:
            await engine.lost()
        assert watch.seconds < 10
        await engine.attach(Source(directory))
        assert not runs(stopped)
        await engine.load(8)
        assert (await engine.generate([1], SHORT)).versions == [8] * 5


async def busy_standing(directory: Path, process: subprocess.Popen[bytes]) -> None:
    async with closing(ServerEngine(place(directory), deadline_s=10)) as engine:
        source = Source(directory)
        await engine.attach(source)
        await engine.load(7)
        request = await under_way(engine)
        with Stopwatch() as watch:
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineLost):
                await request
            await engine.lost()
        assert watch.seconds < 10
        with pytest.raises(EngineLost, match="none answers"):
            await engine.attach(source)
        process.send_signal(signal.SIGCONT)
        await engine.attach(source)
        assert source.replies[0]["boot_id"] == source.replies[-1]["boot_id"]
        assert (await engine.generate([1], SHORT)).versions == [7] * 5, "it has what was loaded into it"
        await engine.attach(Source(directory, "restart"))
        with pytest.raises(SyncError, match="did not start it"):
            await engine.load(8)


def test_engines_that_were_stopped_are_lost_within_10_s_and_only_our_own_is_replaced(
    tmp_path: Path, standing: subprocess.Popen[bytes]
) -> None:
    async def work() -> None:
        await asyncio.gather(idle_owned(tmp_path / "owned"), busy_standing(tmp_path, standing))

    play(work)
    assert standing.poll() is None, "it was closed, and it is not ours"


def test_a_foreign_engine_that_was_restarted_is_another_one(tmp_path: Path, standing: subprocess.Popen[bytes]) -> None:
    async def work() -> None:
        first = place(tmp_path, patience_s=60)
        port = first.url.rpartition(":")[2]
        engine = ServerEngine(first, deadline_s=10)
        async with closing(engine):
            source = Source(tmp_path)
            await engine.attach(source)
            await engine.load(7)
            standing.kill()
            await asyncio.to_thread(standing.wait)
            again = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SAME_PORT.format(path=str(Path(PROGRAM).parent)), port, str(tmp_path),
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                await engine.lost()
                await engine.attach(source)
                assert source.replies[0]["boot_id"] != source.replies[-1]["boot_id"]
                await engine.load(8)
                assert (await engine.generate([1], SHORT)).versions == [8] * 5
            finally:
                again.kill()
                await again.wait()

    play(work)


SAME_PORT = """
import sys
import threading
sys.path.insert(0, {path!r})
import engine_program, tandem.serve.http.run as run
init = run.Listen.__init__
run.Listen.__init__ = lambda self, data_dir, **options: init(self, data_dir, port=int(sys.argv[1]), **options)
from pathlib import Path
engine_program.main(3, Path(sys.argv[2], "ready.json"), Path(sys.argv[2]))
"""


def test_a_trainer_that_was_replaced_ends_and_does_not_take_turns(
    tmp_path: Path, standing: subprocess.Popen[bytes]
) -> None:
    async def work() -> None:
        async with closing(ServerEngine(place(tmp_path))) as zombie, closing(ServerEngine(place(tmp_path))) as heir:
            await zombie.attach(Source(tmp_path))
            await zombie.load(7)
            await heir.attach(Source(tmp_path))
            with pytest.raises(TandemError, match="another trainer") as raised:
                await zombie.load(8)
            assert not isinstance(raised.value, (SyncError, EngineError)), "those are tried again"
            assert (await heir.load(9)).version == 9

    play(work)


async def left_torn(directory: Path, lease_s: float) -> None:
    engine = ServerEngine(place(directory), shares_memory=True, lease_s=lease_s)
    async with closing(engine):
        (directory / "torn").unlink(missing_ok=True)
        await engine.attach(Source(directory))
        await engine.load(7)
        await engine.sleep()
        await asyncio.sleep(1.5 * lease_s)
        assert (await engine.load(8)).version == 8, "it was renewed"
        await engine.sleep()
        await engine._stop_renewing()  # as if this process had been stopped
        (directory / "torn").touch()
        await asyncio.wait_for(engine.lost(), 10 * lease_s)
        with pytest.raises(EngineLost, match="interrupted"):
            await engine.generate([1], SHORT)
        await engine.attach(Source(directory))
        await engine.load(9)
        assert (await engine.generate([1], SHORT)).versions == [9] * 5


def test_weights_that_were_left_torn_are_a_lost_engine_until_they_are_loaded(
    tmp_path: Path, standing: subprocess.Popen[bytes]
) -> None:
    async def work() -> None:
        for lease_s in (0.4, 1.6):  # a busy machine may fail to renew a short one in time, a mistake fails all three
            with suppress(EngineLost):
                return await left_torn(tmp_path, lease_s)
        return await left_torn(tmp_path, 6.4)

    play(work)


# --- by a new start


def test_a_version_by_restart_keeps_who_asks_waiting_and_loses_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(owned(tmp_path, max_restarts=0)) as engine:
            for version in (7, 8):
                (tmp_path / f"v{version}").mkdir()
            source = Source(tmp_path, "restart")
            await engine.attach(source)
            lost = asyncio.create_task(engine.lost())
            first = await engine.load(7)
            request = await under_way(engine)
            pid = pid_of(tmp_path)
            second = await engine.load(8)
            assert not runs(pid)
            assert (await request).versions == [8] * 500, "asked again from the beginning"
            assert (first.version, second.version, engine.version) == (7, 8, 8)
            assert second.fingerprints == {"w": f"{8:016x}"}
            assert first.engines != second.engines
            assert not lost.done()
            os.kill(pid_of(tmp_path), signal.SIGKILL)
            await lost

    play(work)


# --- the real thing, by its command line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    make_model("tiny", tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def real(model: str, version: int, ready_file: Path) -> list[str]:
    options = ["--version", version, "--ready-file", ready_file, "--data-dir", ready_file.parent, "--device", "cpu"]
    return [sys.executable, "-m", "tandem", "engine", "serve", model, *map(str, options)]


def test_a_second_server_is_refused_where_one_keeps_its_token(model: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(real(str(model), 0, ready), env=environment, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until(ready.exists, 60)
            second = subprocess.run(
                real(str(model), 0, ready), env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert second.returncode == 1
            assert f"belongs to process {first.pid}" in second.stderr
            assert pid_of(tmp_path) == first.pid
        finally:
            first.kill()


def test_the_real_engine_shares_its_memory_survives_a_kill_and_ends_in_time(model: Path, tmp_path: Path) -> None:
    import torch

    from tandem.bridge.shared.sender import SharedBridge

    bridge = SharedBridge(deadline_s=10)

    async def step(engine: ServerEngine, version: int, change: float) -> Completion:
        """Writes into the engine's memory, as a trainer does; the canary is what the engine says afterwards."""
        await engine.sleep()
        tensors = bridge.storage()
        assert tensors is not None
        with torch.no_grad():
            tensors["model.norm.weight"].add_(change)
        bridge.send(Weights(version, "live", lambda: iter(tensors.items())))
        served = await engine.load(version)
        assert served.version == version
        return await engine.generate([5, 6, 7], Sampling(max_tokens=6, temperature=0.0))

    async def work() -> None:
        place = Owned(real, str(model), tmp_path, environment={"OMP_NUM_THREADS": "1"}, start_deadline_s=60)
        async with closing(ServerEngine(place, deadline_s=20, shares_memory=True, lease_s=1.0)) as engine:
            await engine.attach(bridge.source())
            first = await step(engine, 1, 0.0)
            second = await step(engine, 2, 0.5)
            assert (first.versions, second.versions) == ([1] * 6, [2] * 6)
            assert first.logprobs != second.logprobs
            await engine.sleep()
            await asyncio.sleep(2.5)  # longer than its lease: it is renewed
            again = await step(engine, 3, 0.0)
            assert again.logprobs == pytest.approx(second.logprobs, abs=1e-5)
            os.kill(pid_of(tmp_path), signal.SIGKILL)
            await engine.lost()
            await engine.attach(bridge.source())
            assert (await step(engine, 4, 0.0)).logprobs == pytest.approx(first.logprobs, abs=1e-5)
            waiting = asyncio.create_task(engine.load(5))  # which nobody sends
            await asyncio.sleep(0.3)
            began = time.monotonic()
            os.kill(pid_of(tmp_path), signal.SIGTERM)
            with pytest.raises(EngineLost):
                await waiting
            await engine.lost()
            assert time.monotonic() - began < 10

    play(work)


def test_the_next_engine_waits_with_its_imports_done_and_is_replaced_if_it_dies(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def command(*which: Any) -> list[str]:
        return [*real(*which), "--allow-dir", str(tmp_path)]

    before = programs_below()

    def serving() -> int:
        newest = max(tmp_path.glob("ready-*.json"), key=lambda file: file.stat().st_mtime_ns)
        return json.loads(newest.read_text())["pid"]

    def waiting() -> int:
        """The other program that this process has started, once its leash has."""
        until = time.monotonic() + 20
        while len(found := programs_below() - before - {serving()}) != 1:
            assert time.monotonic() < until, found
            time.sleep(0.02)
        return found.pop()

    async def work() -> list[int]:
        place = Owned(command, str(model), tmp_path, environment={"OMP_NUM_THREADS": "1"}, ahead=True)
        async with closing(ServerEngine(place, deadline_s=60)) as engine:
            source = Source(tmp_path, "restart")
            for version in (1, 2, 3):
                (tmp_path / f"v{version}").symlink_to(model, target_is_directory=True)
            await engine.attach(source)
            programs = [serving(), waiting()]
            assert (await engine.load(1)).version == 1
            assert serving() == programs[1]
            assert (await engine.generate([5, 6], Sampling(max_tokens=3))).versions == [1] * 3
            programs.append(waiting())
            os.kill(programs[2], signal.SIGKILL)
            assert "of no use" not in caplog.text
            assert (await engine.load(2)).version == 2
            assert "started early failed" in caplog.text
            assert "signal 9" in caplog.text
            programs.append(waiting())
            assert (await engine.load(3)).version == 3
            assert serving() == programs[3]
            assert (await engine.generate([5, 6], Sampling(max_tokens=3))).versions == [3] * 3
            return [*programs, waiting()]

    programs: list[int] = play(work)
    assert len(set(programs)) == 5
    assert not any(Path(f"/proc/{each}").exists() for each in programs), "none outlives its owner"
    assert {path.name for path in tmp_path.glob("ready*")} <= {"ready-0.json", "ready-1.json"}


def test_who_closes_an_engine_while_it_starts_leaves_none_behind(tmp_path: Path) -> None:
    """The start is on a thread, which nobody can cancel."""
    begun, go_on, pids, before = threading.Event(), threading.Event(), list[int](), programs_below()

    def slow(model: str, version: int, ready_file: Path) -> list[str]:
        begun.set()
        assert go_on.wait(30)
        return command(model, version, ready_file)

    process = OwnedProcess(Owned(slow, str(tmp_path), tmp_path, start_deadline_s=30, ahead=True))

    def start() -> None:
        with pytest.raises(EngineError):
            process.start_with(str(tmp_path), 1)
        pids.append(0)

    starting = threading.Thread(target=start)
    starting.start()
    assert begun.wait(30)
    ending = threading.Thread(target=process.end)
    ending.start()
    go_on.set()
    ending.join(30)
    starting.join(30)
    assert pids == [0]
    assert programs_below() == before
