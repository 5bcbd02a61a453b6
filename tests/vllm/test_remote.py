"""A stock vLLM server, started as its own documentation says and without a line of ours in it, as a remote engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cpu import PYTHON, adapted, gap, small_model

from tandem.bridge.files.adapter import AdapterBridge
from tandem.engine.pool import EnginePool
from tandem.engine.remote.engine import RemoteEngine
from tandem.errors import EngineError, SyncError
from tandem.model import served_weights
from tandem.publish import Canary, Publisher
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Proof, Sampling, Weights

PROMPT = [5, 17, 33, 90, 121, 7, 64]
GREEDY = Sampling(max_tokens=8, temperature=0.0)
NEAR, FAR = 0.001, 0.05  # float32
CANARY = Canary(tuple(PROMPT), floor=NEAR, ceiling=0.01)


class Stock:
    """The server's process. It can be killed and started again at the same address."""

    def __init__(self, folder: Path, module: Any) -> None:
        self.folder, self.module = folder, module
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        environment = {
            "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, its threads and its server take turns on one core
        }  # fmt: skip
        command = (
            f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {self.folder} --served-model-name base --dtype "
            f"float32 --enforce-eager --max-model-len 2048 --host 127.0.0.1 --port {self.port} --enable-lora "
            "--max-lora-rank 8 --max-loras 2 --max-cpu-loras 4 --logprobs-mode processed_logprobs"
        )
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(
                command.split(), stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + 300
        while True:
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()[-3000:]
            assert time.monotonic() < until, "it does not start"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: Any) -> Iterator[Stock]:
    folder = tmp_path_factory.mktemp("stock")
    tokenizer = byte_tokenizer()
    module = small_model(
        dtype=torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    server = Stock(folder, module)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


class Teacher:
    def __init__(self, module: Any) -> None:
        self.version, self.module = 1, module

    def export(self, kind: Any) -> Weights:
        config = served_weights.adapter_config(self.module)
        return Weights(self.version, "adapter", lambda: served_weights.adapter(self.module.base_model.model), config)

    @torch.no_grad()
    def score(self, ids: Any, first: int) -> list[float]:
        logits = self.module(torch.tensor([list(ids)])).logits[0, first - 1 : -1].log_softmax(-1)
        return logits[torch.arange(len(ids) - first), torch.tensor(ids[first:])].tolist()

    def base(self) -> Any:
        return served_weights.base(self.module)

    def live_in(self, storage: Any) -> None: ...


def play(engine: Any, scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        try:
            return await asyncio.wait_for(scenario(), 300)
        finally:
            await engine.close()

    return asyncio.run(go())


def told(completion: Completion) -> dict[str, Any]:
    return {"ids": completion.ids, "logprobs": completion.logprobs}


def test_with_fixed_weights_ids_logprobs_seeds_and_ends_are_as_of_any_engine(stock: Stock):
    engine = RemoteEngine(stock.url, "base")

    async def scenario() -> None:
        greedy = await engine.generate(PROMPT, Sampling(max_tokens=20, temperature=0.0))
        assert gap(stock.module, PROMPT, told(greedy)) < NEAR
        assert (greedy.versions, greedy.finish_reason) == ([-1] * 20, "length")
        stop_id = greedy.ids[5]
        stopped = await engine.generate(PROMPT, Sampling(max_tokens=20, temperature=0.0, stop_ids=(stop_id,)))
        expected = greedy.ids[: greedy.ids.index(stop_id) + 1]
        assert (stopped.ids, stopped.finish_reason) == (expected, "stop")
        one, same, other = [
            await engine.generate(PROMPT, Sampling(max_tokens=20, seed=seed, temperature=0.9)) for seed in (3, 3, 4)
        ]
        assert one.ids == same.ids != other.ids
        many = await asyncio.gather(*(engine.generate([i + 1, 2], Sampling(max_tokens=20, seed=i)) for i in range(24)))
        for i, completion in enumerate(many):
            assert gap(stock.module, [i + 1, 2], told(completion)) < NEAR
        heard: list[int] = []
        completion = await engine.generate(PROMPT, GREEDY, on_token=lambda *token: heard.append(token[0]))
        assert heard == completion.ids
        with pytest.raises(EngineError, match="400 max_tokens=5000 cannot be greater"):
            await engine.generate(PROMPT, Sampling(max_tokens=5000))

    play(engine, scenario)


def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(stock: Stock):
    engine, sampling = RemoteEngine(stock.url, "base"), Sampling(max_tokens=16, temperature=0.7, top_p=0.6, seed=3)
    completion = play(engine, lambda: engine.generate(PROMPT, sampling))
    with torch.no_grad():
        logits = stock.module(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    for row, token, logprob in zip(logits.double(), completion.ids, completion.logprobs, strict=True):
        probability, order = row.softmax(-1).sort(descending=True)
        kept = order[probability.cumsum(-1) - probability < 0.6]
        assert abs(row[kept].log_softmax(-1)[kept.tolist().index(token)].item() - logprob) < 0.001


def test_versions_are_published_with_a_canary_s_proof_and_served(stock: Stock):
    engine, bridge, proofs = RemoteEngine(stock.url, "base"), AdapterBridge(deadline_s=20), list[Proof]()
    publisher = Publisher(bridge, engine, deadline_s=30, canary=CANARY, on_proof=proofs.append)

    async def scenario() -> None:
        for version in (1, 2, 3, 4):
            teacher = Teacher(adapted(stock.module, seed=version))
            teacher.version = version
            proof = await publisher.publish(teacher)
            assert proof.verified == "canary"
            assert proof.logprob_gap < NEAR
            completion = await engine.generate(PROMPT, GREEDY)
            assert set(completion.versions) == {version}
            assert gap(teacher.module, PROMPT, told(completion)) < NEAR
            assert gap(stock.module, PROMPT, told(completion)) > FAR
        held = [name for name in await engine._models() if name != "base"]
        assert [name.rpartition("-")[2] for name in held] == ["v4"], "older ones were unloaded"

    play(engine, scenario)
    bridge.close()


@pytest.mark.parametrize("on_update", ["finish", "restart"])
def test_a_request_under_way_is_of_one_version_to_its_last_token(stock: Stock, on_update: Any):
    engine, bridge = RemoteEngine(stock.url, "base", on_update=on_update), AdapterBridge(deadline_s=20)
    publisher = Publisher(bridge, engine, deadline_s=30, canary=CANARY)
    teachers = [Teacher(adapted(stock.module, seed=seed)) for seed in (1, 2)]
    teachers[1].version = 2

    async def scenario() -> None:
        await publisher.publish(teachers[0])
        begun = asyncio.Event()
        asking = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(1500, seed=seed), on_token=lambda *_: begun.set()))
            for seed in range(3)
        ]
        await begun.wait()
        await publisher.publish(teachers[1])
        versions = set[int]()
        for completion in await asyncio.gather(*asking):
            (version,) = set(completion.versions)
            versions.add(version)
            assert gap(teachers[version - 1].module, PROMPT, told(completion)) < NEAR
        assert max(versions) == (1 if on_update == "finish" else 2)

    play(engine, scenario)
    bridge.close()


@pytest.mark.parametrize(
    ("fault", "match"), [("rank", "max-lora-rank|rank 16"), ("gone", "No adapter found|not taken")]
)
def test_a_version_that_it_cannot_take_is_refused_and_the_one_before_serves_on(stock: Stock, fault: str, match: str):
    engine, bridge = RemoteEngine(stock.url, "base"), AdapterBridge(deadline_s=20)
    publisher = Publisher(bridge, engine, deadline_s=30, canary=CANARY)

    async def scenario() -> None:
        teacher = Teacher(adapted(stock.module, seed=1))
        await publisher.publish(teacher)
        other = Teacher(adapted(stock.module, seed=2, rank=16 if fault == "rank" else 4))
        other.version = 2
        if fault == "gone":
            put_there = engine._put_there

            async def unseen(model: Any, path: str) -> None:
                shutil.rmtree(path)  # on a disk that the server does not see
                await put_there(model, path)

            engine._put_there = unseen
        with pytest.raises(SyncError, match=match):
            await publisher.publish(other)
        completion = await engine.generate(PROMPT, GREEDY)
        assert set(completion.versions) == {1}
        assert gap(teacher.module, PROMPT, told(completion)) < NEAR

    play(engine, scenario)
    bridge.close()


def test_a_server_that_is_killed_and_started_again_is_taken_back_and_no_request_is_lost(stock: Stock):
    pool, bridge, proofs = EnginePool([RemoteEngine(stock.url, "base", patience_s=300)]), AdapterBridge(), list[Proof]()
    publisher = Publisher(bridge, pool, deadline_s=30, retries=2, canary=CANARY, on_proof=proofs.append)
    teacher = Teacher(adapted(stock.module, seed=1))

    async def scenario() -> float:
        await publisher.publish(teacher)
        keeping = asyncio.create_task(publisher.watch(teacher))
        begun = asyncio.Event()
        asking = [
            asyncio.create_task(pool.generate(PROMPT, Sampling(1500, seed=seed), on_token=lambda *_: begun.set()))
            for seed in range(3)
        ]
        await begun.wait()
        stock.kill()
        stock.start()
        await asyncio.to_thread(stock.wait_ready)
        ready = time.monotonic()
        for completion in await asyncio.gather(*asking):
            assert set(completion.versions) == {1}
            assert gap(teacher.module, PROMPT, told(completion)) < NEAR
        took_s = time.monotonic() - ready
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        return took_s

    assert play(pool, scenario) < 30
    assert [len(proof.engines) for proof in proofs] == [1, 1]
    assert proofs[0].engines != proofs[1].engines
    bridge.close()
