"""Versions reach a server as LoRA files, each under its own name; what it made of them is not taken on trust."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_script import BASE, Folder, Running, VllmScript, delta, running

from tandem.engine.pool import EnginePool
from tandem.engine.remote.engine import RemoteEngine
from tandem.errors import EngineError, EngineLost, LogprobGap, SyncError
from tandem.publish import Canary, Publisher
from tandem.types import Completion, Proof, Sampling, Sent, Span, Weights

LONG = Sampling(max_tokens=40)


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def engine_at(server: Running, **options: Any) -> RemoteEngine:
    return RemoteEngine(server.url, BASE, **{"poll_s": 0.02, "deadline_s": 20.0, "patience_s": 0.2} | options)


def play(engine: Any, scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        try:
            return await asyncio.wait_for(scenario(), 60)
        finally:
            await engine.close()

    return asyncio.run(go())


async def publish(engine: Any, folder: Folder, version: int, strength: float = 0.0) -> Any:
    folder.put(version, strength)
    return await engine.load(version)


def started(server: Running, count: int) -> Awaitable[None]:
    async def wait() -> None:
        async with asyncio.timeout(20):
            while server.script.running < count:
                await asyncio.sleep(0.005)

    return wait()


def test_a_version_is_a_name_of_its_own_and_every_later_request_asks_for_it(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> list[Completion]:
        with pytest.raises(SyncError, match="before attach"):
            await engine.load(3)
        await engine.attach(folder)
        with pytest.raises(EngineLost, match="no version is loaded yet"):
            await engine.generate([1], LONG)
        answers = list[Completion]()
        for version, strength in ((3, 0.5), (4, 0.25), (4, 0.75)):
            served = await publish(engine, folder, version, strength)
            assert (served.version, engine.version) == (version, version)
            assert served.fingerprints == folder.sent[version].expected
            assert (served.read_back, len(served.engines)) == (False, 1)
            answers.append(await engine.generate([1, 2], Sampling(max_tokens=4)))
        assert engine.cache_epoch == 3
        return answers

    first, second, again = play(engine, scenario)
    assert [answer.spans for answer in (first, second, again)] == [[Span(3, 4)], [Span(4, 4)], [Span(4, 4)]]
    assert [answer.logprobs[0] for answer in (first, second, again)] == [-1.5, -1.25, -1.75]
    assert len(set(server.script.loaded)) == 3, "the same version under a new name: an old prefix is never found"
    assert server.script.unloaded == server.script.loaded[:2], "nobody asks for them any more"


def test_two_engines_at_one_server_never_share_a_name(server: Running, folder: Folder) -> None:
    for _ in range(2):
        engine = engine_at(server)

        async def scenario(engine: RemoteEngine = engine) -> None:
            await engine.attach(folder)
            await publish(engine, folder, 1, 0.5)

        play(engine, scenario)
    assert len(set(server.script.loaded)) == 2


# --- requests under way


def test_a_request_ends_under_the_version_that_it_began_with(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> tuple[Completion, Completion]:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        server.script.pause_s = 0.1
        old = asyncio.create_task(engine.generate([1], LONG))
        await started(server, 1)
        await publish(engine, folder, 2, 0.25)
        assert not old.done(), "what runs is not waited for"
        new = await engine.generate([1], Sampling(max_tokens=2))
        assert server.script.unloaded == []
        server.script.pause_s = 0
        finished = await old
        await publish(engine, folder, 3)
        return finished, new

    old, new = play(engine, scenario)
    assert (old.spans, set(old.logprobs)) == ([Span(1, 40)], {-1.5})
    assert (new.spans, set(new.logprobs)) == ([Span(2, 2)], {-1.25})
    assert server.script.unloaded == server.script.loaded[:2]


def test_with_restart_a_request_is_asked_again_under_the_new_version(server: Running, folder: Folder) -> None:
    engine, heard = engine_at(server, on_update="restart"), []

    async def scenario() -> Completion:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        server.script.pause_s = 0.1
        asking = asyncio.create_task(engine.generate([1], LONG, on_token=lambda *token: heard.append(token[2])))
        async with asyncio.timeout(10):
            while len(heard) < 3:
                await asyncio.sleep(0.005)
        await publish(engine, folder, 2, 0.25)
        server.script.pause_s = 0
        return await asking

    completion = play(engine, scenario)
    assert (completion.spans, set(completion.logprobs)) == ([Span(2, 40)], {-1.25})
    assert heard == [1] * heard.count(1) + [2] * 40, "the new ones after the old"
    assert 0 < heard.count(1) < 40


def test_no_more_adapters_than_slots_are_there_at_once(server: Running, folder: Folder) -> None:
    engine, most = engine_at(server, slots=2), 0

    async def scenario() -> list[Completion]:
        nonlocal most
        await engine.attach(folder)
        answers = []
        for version in range(1, 6):
            await publish(engine, folder, version, version / 8)
            most = max(most, len(server.script.adapters))
            server.script.pause_s = 0.004
            answers.append(asyncio.create_task(engine.generate([1], LONG)))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*answers)

    answers = play(engine, scenario)
    assert most == 2
    assert [answer.spans for answer in answers] == [[Span(version, 40)] for version in range(1, 6)]


# --- what a server may do with a version


def no_config(script: VllmScript, path: Path) -> None:
    (path / "adapter_config.json").unlink()


def no_config_and_a_lie(script: VllmScript, path: Path) -> None:
    no_config(script, path)
    script.missing_path = "unlisted"


def no_lora(script: VllmScript, path: Path) -> None:
    plain = script.load
    script.load = lambda body: (404, {"detail": "Not Found"}) if body["lora_path"] == str(path) else plain(body)


def elsewhere(script: VllmScript, path: Path) -> None:
    plain = script.load
    script.load = lambda body: plain({**body, "lora_path": str(path.with_name("v-000001"))})


def answers_nothing(script: VllmScript, path: Path) -> None:
    script.events = lambda body, events: [{"error": {"message": "cannot load the adapter"}}]


REFUSED: dict[str, tuple[Callable[[VllmScript, Path], None], str]] = {
    "it does not see the files": (no_config, "not loaded: .*No adapter found.*--enable-lora"),
    "it says that it has it, and has not": (
        no_config_and_a_lie,
        "but does not list it: several servers behind one URL",
    ),
    "it cannot load adapters": (no_lora, "not loaded: .*404 Not Found.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "it took another directory": (elsewhere, "is from '.*v-000001', not from '.*v-000002'"),
    "it has it and cannot use it": (answers_nothing, "is loaded but does not answer: .*cannot load the adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_version_that_the_server_did_not_take_is_refused_and_the_one_before_serves_on(
    case: str, server: Running, folder: Folder
) -> None:
    spoil, match = REFUSED[case]
    engine, script = engine_at(server), server.script

    async def scenario() -> None:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        well = dict(vars(script))
        spoil(script, Path(folder.put(2, 0.25).path))
        with pytest.raises(SyncError, match=match):
            await engine.load(2)
        vars(script).update(load=script.__class__.load.__get__(script), events=well["events"])
        answer = await engine.generate([1], Sampling(max_tokens=2))
        assert (answer.spans, answer.logprobs, engine.version) == ([Span(1, 2)], [-1.5, -1.5], 1)
        await publish(engine, folder, 3, 0.125)
        assert len(script.adapters) == 1, "what was refused is not left there"
        assert (await engine.generate([1], Sampling(max_tokens=1))).logprobs == [-1.125]

    play(engine, scenario)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def test_files_that_are_not_what_was_sent_are_never_loaded(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> None:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        sent = folder.put(2, 0.25)
        changed = {**dict(sent.tensors()), NAME: torch.ones(4, 2)}
        for spoiled, match in (
            (Weights(2, "adapter", lambda: iter(changed.items()), expected=sent.expected, path=sent.path), "lora_B"),
            (Weights(2, "adapter", lambda: iter(()), expected={}, path=sent.path), "only the base would be served"),
            (Weights(2, "adapter", sent.tensors, expected={}, path=sent.path), "are not what was sent"),
            (Weights(2, "adapter", sent.tensors, expected=sent.expected), "asked for version 2 as LoRA files"),
            (Weights(2, "full", sent.tensors, expected=sent.expected, path=sent.path), "got full weights"),
            (Weights(1, "adapter", sent.tensors, expected=sent.expected, path=sent.path), "weights of version 1"),
        ):
            folder.sent[2] = spoiled
            with pytest.raises(SyncError, match=match):
                await engine.load(2)
        folder.put(2, 0.0, **{NAME: torch.full((4, 2), math.nan)})
        with pytest.raises(SyncError, match="is not finite"):
            await engine.load(2)
        assert len(server.script.loaded) == 1
        assert (await engine.generate([1], Sampling(max_tokens=1))).spans == [Span(1, 1)]

    play(engine, scenario)


def test_a_bridge_without_lora_files_is_refused(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> None:
        for carries, link in (("full", {"mode": "disk"}), ("adapter", {"mode": "adapter_broadcast"}), ("live", {})):
            folder.carries, folder.link = carries, link  # pyright: ignore
            with pytest.raises(SyncError, match=r"only load LoRA files.*sync.bridge = 'adapter'"):
                await engine.attach(folder)

    play(engine, scenario)


def test_an_answer_of_another_model_is_refused(server: Running, folder: Folder) -> None:
    """A proxy that falls back to the base when it does not know a name."""
    engine = engine_at(server)

    async def scenario() -> None:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        server.script.events = lambda body, events: [{**event, "model": BASE} for event in events]
        with pytest.raises(EngineError, match=f"asked for model 'tandem-.*-v1', but '{BASE}' answers"):
            await engine.generate([1], LONG)

    play(engine, scenario)


def test_weights_that_change_beneath_an_adapter_are_noticed(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> None:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)

        def spans(body: Any, events: list[Any]) -> list[Any]:
            events[-1]["choices"][0]["weight_versions"] = [["default", 30], ["other", 10]]
            return events

        server.script.events = spans
        with pytest.raises(EngineError, match=r"the weights of 'tandem-.*' changed in the middle"):
            await engine.generate([1], LONG)

    play(engine, scenario)


# --- proof


class Teacher:
    """Its logprobs are what a server has that serves its adapter."""

    version = 1

    def __init__(self, folder: Folder) -> None:
        self.folder, self.strength = folder, 0.5

    def export(self, kind: Any) -> Weights:
        assert kind == "adapter"
        return self.folder.put(self.version, self.strength)

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        return [-1.0 - delta(Path(self.folder.sent[self.version].path))] * (len(ids) - first)

    def base(self) -> Any:
        return iter(())

    def live_in(self, storage: Any) -> None: ...


class FolderBridge:
    mode, carries = "adapter", "adapter"

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def source(self, num_receivers: int = 1) -> Folder:
        return self.folder

    def storage(self) -> None:
        return None

    def send(self, weights: Weights) -> Sent:
        return Sent(weights.version, self.mode, weights.expected)

    def close(self) -> None: ...


CANARY = Canary((1, 2, 3), floor=0.01, ceiling=0.02)


def publisher(folder: Folder, engine: Any, **options: Any) -> Publisher:
    return Publisher(FolderBridge(folder), engine, **{"deadline_s": 20.0, "canary": CANARY} | options)  # pyright: ignore


def test_a_proof_does_not_say_that_the_engine_s_memory_was_read(server: Running, folder: Folder) -> None:
    engine = engine_at(server)
    proof = play(engine, lambda: publisher(folder, engine).publish(Teacher(folder)))
    assert (proof.verified, proof.tensors) == ("canary", 2)
    assert proof.logprob_gap < 1e-6


def test_without_a_canary_nothing_is_proven(server: Running, folder: Folder) -> None:
    engine = engine_at(server)
    with pytest.raises(SyncError, match="there is no canary: nothing proves what it serves"):
        play(engine, lambda: publisher(folder, engine, canary=None).publish(Teacher(folder)))


def test_a_server_that_says_it_has_an_adapter_and_serves_the_base_fails_the_canary(
    server: Running, folder: Folder
) -> None:
    """As vLLM once did: 200 for a path that it cannot see, the name is listed, and the base answers."""
    engine, teacher = engine_at(server), Teacher(folder)

    async def scenario() -> None:
        keeper = publisher(folder, engine)
        await keeper.publish(teacher)
        server.script.missing_path = "accept"
        plain = server.script.load
        server.script.load = lambda body: plain({**body, "lora_path": body["lora_path"] + "-not-there"})
        teacher.version = 2
        models = server.script.models
        server.script.models = lambda: {
            "data": [{key: value for key, value in each.items() if key != "root"} for each in models()["data"]]
        }
        with pytest.raises(LogprobGap, match=r"differ by 0\.5"):
            await keeper.publish(teacher)

    play(engine, scenario)


# --- lost and found


def test_a_server_that_was_started_again_is_lost_and_taken_back(server: Running, folder: Folder) -> None:
    engine = engine_at(server)

    async def scenario() -> None:
        await engine.attach(folder)
        await publish(engine, folder, 1, 0.5)
        losing = asyncio.create_task(engine.lost())
        await asyncio.sleep(0.2)
        assert not losing.done()
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start_anew)
        with pytest.raises(EngineLost, match=r"does not exist.*restarted, and its adapters are gone"):
            await engine.generate([1], LONG)
        await asyncio.wait_for(losing, 10)
        await engine.attach(folder)
        assert engine.version == -1
        with pytest.raises(EngineLost, match="no version is loaded yet"):
            await engine.generate([1], LONG)
        await engine.load(1)
        assert (await engine.generate([1], Sampling(max_tokens=1))).logprobs == [-1.5]

    play(engine, scenario)


def test_attaching_waits_a_while_for_a_server_that_is_being_started(server: Running, folder: Folder) -> None:
    engine = engine_at(server, patience_s=5.0)

    async def scenario() -> None:
        await asyncio.to_thread(server.stop)
        attaching = asyncio.create_task(engine.attach(folder))
        await asyncio.sleep(0.3)
        assert not attaching.done()
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(attaching, 10)

    play(engine, scenario)


def test_of_two_servers_one_dies_hangs_and_returns_and_no_request_is_lost(folder: Folder) -> None:
    with running(pause_s=0.002) as one, running(pause_s=0.002) as other:
        pool = EnginePool([engine_at(each, deadline_s=0.5) for each in (one, other)])
        proofs, teacher = list[Proof](), Teacher(folder)

        async def scenario() -> list[Completion]:
            keeper = publisher(folder, pool, retries=3, on_proof=proofs.append)
            await keeper.publish(teacher)
            keeping, stopped, answered = asyncio.create_task(keeper.watch(teacher)), asyncio.Event(), list[Completion]()

            async def client() -> None:
                while not stopped.is_set():
                    answered.append(await pool.generate([1], Sampling(max_tokens=5)))

            async def serving(count: int) -> None:
                async with asyncio.timeout(10):
                    while len(proofs[-1].engines) != count:
                        assert not keeping.done(), keeping
                        await asyncio.sleep(0.01)

            clients = [asyncio.create_task(client()) for _ in range(6)]
            await asyncio.sleep(0.1)
            await asyncio.to_thread(one.stop)
            await serving(1)
            teacher.version, teacher.strength = 2, 0.25
            await keeper.publish(teacher)
            await asyncio.to_thread(one.start_anew)
            await serving(2)
            other.script.hang.set()  # stopped in the middle: connections stay, nothing comes
            other.script.health = 503
            await serving(1)
            other.script.hang.clear()
            other.script.health = 200
            await serving(2)
            stopped.set()
            await asyncio.gather(*clients)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            return answered

        answered = play(pool, scenario)
        assert {(answer.versions[0], answer.logprobs[0]) for answer in answered} == {(1, -1.5), (2, -1.25)}
        assert {len(answer.ids) for answer in answered} == {5}
        assert [proof.verified for proof in proofs] == ["canary"] * len(proofs)
