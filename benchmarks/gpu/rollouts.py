"""Rollouts through vLLM in tokens a second, as a run has them and as vLLM gives them: `benchmarks/gpu/rollouts.py`.

REQUESTS prompts of 128 tokens, 512 new ones each, nothing ends sooner; random weights of a released model's shape. One
`tandem engine serve` with vLLM behind it; `run` asks it as a run does, with a listener to whom each token is told. The
other ways ask the server of that same vLLM, Tandem's scheduler included, over its socket: tokens one by one with their
logprobs, in one piece with them, and in one piece without. vLLM as it ships: `vllm_alone.py rollouts`. Logprobs of
`run` are compared with those that vLLM sends of the same tokens. Several engines behind one pool: pools.py.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from standing import checkpoint_of

from tandem.build import standalone_engines
from tandem.engine.http.client import HttpClient
from tandem.engine.http.server_sent_events import server_sent
from tandem.engine.server.child_process import Owned
from tandem.engine.server.engine import ServerEngine
from tandem.io.engine_messages import decoded, encoded
from tandem.protocols import Engine
from tandem.types import Completion, Sampling

PROMPT, FINAL_ONLY = 128, 2
ROUTE = "/inference/v1/generate"


def serve(arguments: argparse.Namespace) -> None:
    """`tandem engine serve`, but that no token ends a completion."""
    from tandem.engine.vllm.engine import VllmEngine
    from tandem.engine.vllm.options import VllmOptions
    from tandem.engine.vllm.process import VllmProcess
    from tandem.serve.engine.service import engine_service
    from tandem.serve.http.run import Listen, serve_forever
    from tandem.serve.http.service import create_app
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import load_tokenizer
    from tandem.vllm_worker.weight_sources import open_source

    path, home, ids = str(arguments.checkpoint), arguments.home, vocabulary(arguments.checkpoint)
    context = PROMPT + arguments.tokens
    process = VllmProcess(
        VllmOptions(
            path, arguments.python, dtype="bfloat16", device=arguments.device, memory_share=arguments.share,
            max_running=arguments.requests, max_context=context, eager=arguments.device == "cpu",
            further=arguments.extra.split(),
        ),
        home,
    )  # fmt: skip
    process.wait_ready(300)
    (home / "socket").write_text(str(process.socket))
    engine = VllmEngine(process, end_ids=frozenset(), num_ids=ids, version=0)
    renderer = Renderer(load_tokenizer(path), thinking=False)
    service = engine_service(engine, open_source, renderer=renderer, model_id="m", context=context, num_ids=ids)
    listen = Listen(data_dir=home, ready_file=arguments.ready)
    serve_forever(create_app(service, token=listen.token(), hosts=listen.hosts), listen)


def vocabulary(checkpoint: Path) -> int:
    return json.loads((checkpoint / "config.json").read_text())["vocab_size"]


def prompt_of(index: int, seed: int, num_ids: int) -> list[int]:
    """No pass finds the prompts of the one before in a cache."""
    noise = hashlib.shake_256(f"{seed // 10000} {index}".encode()).digest(PROMPT)
    return [each % num_ids for each in noise]


class Ways:
    def __init__(self, engine: Engine, socket: str, arguments: argparse.Namespace) -> None:
        self.engine, self.tokens = engine, arguments.tokens
        self.num_ids = vocabulary(arguments.checkpoint)
        # As runs ask it: what is compared is what is asked for.
        self.vllm = HttpClient("http://vllm", socket=Path(socket), most=arguments.requests)
        self.told = 0

    async def run(self, index: int, seed: int) -> Completion:
        sampling = Sampling(max_tokens=self.tokens, temperature=1.0, seed=seed, told_within_s=10.0)  # as a run's
        return await self.engine.generate(prompt_of(index, seed, self.num_ids), sampling, on_token=self._tell)

    def _tell(self, *_: Any) -> None:
        self.told += 1

    async def one_by_one(self, index: int, seed: int) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        body = self._body(index, seed, logprobs=0)
        async with self.vllm.stream(ROUTE, encoded(body)) as answer:
            async for data in server_sent(answer.pieces(), "vLLM"):
                if data != b"[DONE]":
                    (choice,) = decoded(data)["choices"]
                    ids += choice["token_ids"]
                    logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
        return Completion(ids, logprobs, [], "length")

    async def whole(self, index: int, seed: int) -> Completion:
        return await self._in_one_piece(self._body(index, seed, stream=False, logprobs=0, output_kind=FINAL_ONLY))

    async def bare(self, index: int, seed: int) -> Completion:
        return await self._in_one_piece(self._body(index, seed, stream=False, output_kind=FINAL_ONLY))

    async def _in_one_piece(self, body: Any) -> Completion:
        (choice,) = decoded((await self.vllm.ask("POST", ROUTE, encoded(body), within_s=600)).content)["choices"]
        content = (choice["logprobs"] or {}).get("content") or []
        return Completion(choice["token_ids"], [each["logprob"] for each in content], [], "length")

    def _body(self, index: int, seed: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
        sampling = {"max_tokens": self.tokens, "seed": seed, "detokenize": False, "ignore_eos": True, **more}
        asked = {"model": "base", "token_ids": prompt_of(index, seed, self.num_ids), "stream": stream}
        return {**asked, "sampling_params": sampling}


def busy() -> dict[str, float]:
    """Seconds of CPU of each process, so far."""
    spent: dict[str, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        spent[f"{name} {path.parent.name}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


async def timed(ask: Callable[[int, int], Awaitable[Completion]], count: int, salt: int) -> dict[str, Any]:
    before, started, ends = busy(), time.perf_counter(), list[float]()

    async def one(index: int) -> Completion:
        completion = await ask(index, salt * 10000 + index)
        ends.append(time.perf_counter() - started)
        return completion

    done = await asyncio.gather(*map(one, range(count)))
    seconds = time.perf_counter() - started
    shares = {name: (spent - before.get(name, 0.0)) / seconds for name, spent in busy().items()}
    top = {name: round(share, 2) for name, share in sorted(shares.items(), key=lambda each: -each[1])[:4]}
    rate = sum(len(each.ids) for each in done) / seconds
    return {"rate": rate, "seconds": seconds, "cpu": top, "ends": [ends[0], ends[-1]], "done": done}


async def compared(ways: Ways, count: int) -> tuple[int, float]:
    """Tokens that both ways sampled from the same seeds, each request alone, until rounding parts them; and the largest
    difference of a logprob among them, in nats."""
    gaps: list[float] = []
    for index in range(count):
        ours, theirs = [await ask(index, 7_000_000 + index) for ask in (ways.run, ways.one_by_one)]
        pairs = zip(ours.ids, theirs.ids, ours.logprobs, theirs.logprobs, strict=True)
        gaps += [abs(a - b) for one, other, a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return len(gaps), max(gaps)


def start(arguments: argparse.Namespace, number: int, *, gpu: int) -> ServerEngine:
    """It is there once it has answered."""
    home = arguments.home / f"{number}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)

    def command(model: str, version: int, ready: Path) -> list[str]:
        names = ("python", "device", "requests", "tokens", "share", "extra")
        passed = [f"--{name}={getattr(arguments, name)}" for name in names]
        told = [f"--checkpoint={model}", f"--ready={ready}", f"--home={home}"]
        return [sys.executable, __file__, "serve", *told, *passed]

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else f"{gpu}"}
    return ServerEngine(Owned(command, str(arguments.checkpoint), home, environment=only, start_deadline_s=300))


async def measure(arguments: argparse.Namespace) -> None:
    engine = start(arguments, 0, gpu=0)
    found: dict[str, Any] = {}
    try:
        await engine.generate([1, 2, 3], Sampling(max_tokens=8))
        ways = Ways(engine, (arguments.home / "0" / "socket").read_text(), arguments)
        try:
            await of_each_way(ways, arguments, found)
        finally:
            await ways.vllm.close()
    finally:
        await engine.close()
        (Path(os.environ.get("OUT", ".")) / "rollouts.json").write_text(json.dumps(found))


async def of_each_way(ways: Ways, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    for number, name in enumerate(["run", *arguments.ways.split(",")]):  # the first one warms up
        ask = getattr(ways, name)
        rows = [await timed(ask, arguments.requests, 10 * number + again + 1) for again in range(arguments.times)]
        rates = [row["rate"] for row in rows]
        found[name] = {"rate": statistics.median(rates), "rates": rates, "cpu": rows[-1]["cpu"]}
        lengths = [len(each.ids) for row in rows for each in row["done"]]
        if min(lengths) < arguments.tokens:
            raise SystemExit(f"{name}: an answer has {min(lengths)} tokens, and {arguments.tokens} were asked for")
        tokens = sum(len(each.ids) for each in rows[-1]["done"])
        shown = f"{name:11} {found[name]['rate']:7.0f} tokens/s of {[round(rate) for rate in rates]}"
        first, last = rows[-1]["ends"]
        print(f"{shown}, {tokens} tokens, ends {first:.2f} to {last:.2f} s, CPU {rows[-1]['cpu']}", flush=True)
    found["told"] = ways.told
    found["compared"] = await compared(ways, min(4, arguments.requests))
    print(f"logprobs of {found['compared'][0]} tokens: largest difference {found['compared'][1]:.2g} nats", flush=True)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--python", default=standalone_engines.default_python())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.6, help="of the GPU's memory, to an engine")
    parser.add_argument("--extra", default="", help="options of vLLM's")
    parser.add_argument("--home", type=Path, default=Path("/tmp/rollouts"))
    return parser.parse_args()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=["measure", "serve"], default="measure")
    parser.add_argument("--ways", default="bare,whole,one_by_one,run")
    parser.add_argument("--ready", type=Path)
    arguments = arguments_of(parser)
    if arguments.what == "serve":
        return serve(arguments)
    arguments.checkpoint = checkpoint_of(arguments)
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
