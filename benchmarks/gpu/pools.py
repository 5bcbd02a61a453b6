"""Several engines behind one pool by tokens a second: `python benchmarks/gpu/pools.py --engines 4`.

Requests of `rollouts.py`, REQUESTS for each engine: to the first engine, to two of them behind one pool, to all behind
one pool, and `apart`: to all at once, each asked by a process of its own, with nothing between them. What one pool does
against `apart` is what having one costs; what it does against one engine is of the machine as well.

One engine on each GPU. Where GPUs are fewer, several have one together: then it is `apart` that they are held against.
Whose turn is first goes round. A pass must take seconds: on a CPU this only shows that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import torch
from standing import checkpoint_of

from rollouts import Ways, arguments_of, start, timed
from tandem.engine.pool import EnginePool
from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.types import Sampling


async def asked_apart(arguments: argparse.Namespace) -> None:
    """Of the engine at `--home`. For each line, a salt of seeds, all requests; the number of tokens goes back."""
    ready = json.loads((arguments.home / "ready.json").read_text())
    engine = ServerEngine(ExistingServer(ready["url"], arguments.home / "token"))
    ways = Ways(engine, "", arguments)
    await engine.generate([1, 2, 3], Sampling(max_tokens=8))
    print("there", flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = (ways.run(index, int(line) * 10000 + index) for index in range(arguments.requests))
            done = await asyncio.gather(*asked)
            print(json.dumps({"tokens": sum(len(each.ids) for each in done)}), flush=True)
    finally:
        await ways.vllm.close()
        await engine.close()


async def client(arguments: argparse.Namespace, number: int) -> Process:
    told = [f"--{name}={getattr(arguments, name)}" for name in ("checkpoint", "requests", "tokens")]
    started = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "ask", f"--home={arguments.home / str(number)}", *told, stdin=PIPE, stdout=PIPE
    )
    await _line(started)
    return started


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SystemExit("a client ended")
    return line


async def apart(clients: list[Process], salt: int) -> dict[str, Any]:
    started = time.perf_counter()
    for number, each in enumerate(clients):
        assert each.stdin is not None
        each.stdin.write(b"%d\n" % (salt + number))
    tokens = [json.loads(line)["tokens"] for line in await asyncio.gather(*map(_line, clients))]
    return {"rate": sum(tokens) / (time.perf_counter() - started)}


async def together(engines: list[ServerEngine], arguments: argparse.Namespace, salt: int) -> dict[str, Any]:
    ways = Ways(EnginePool(engines), "", arguments)
    try:
        return await timed(ways.run, len(engines) * arguments.requests, salt)
    finally:
        await ways.vllm.close()


async def rounds(engines: list[ServerEngine], clients: list[Process], arguments: argparse.Namespace) -> dict[str, Any]:
    counts = [count for count in (1, 2, 4) if count < len(engines)] + [len(engines)]
    ways = [*map(str, counts), "apart"]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for again in range(1 + arguments.times):  # the first of each warms up
        for place in range(len(ways)):
            name, salt = ways[(again + place) % len(ways)], 100 + 10 * (again * len(ways) + place)
            row = await (apart(clients, salt) if name == "apart" else together(engines[: int(name)], arguments, salt))
            rates[name].append(row["rate"])
            print(f"{name:>5}: {row['rate']:7.0f} tokens/s {row.get('cpu', '')}", flush=True)
    middle = {name: statistics.median(each[1:]) for name, each in rates.items()}
    for count in counts[1:]:
        print(f"{count} engines against one: {middle[str(count)] / middle['1']:.2f}x", flush=True)
    by_round = [one / other for one, other in zip(rates[str(len(engines))][1:], rates["apart"][1:], strict=True)]
    shown = ", ".join(f"{each:.3f}" for each in sorted(by_round))
    print(f"one pool against {len(engines)} clients: {statistics.median(by_round):.3f} of ({shown})", flush=True)
    return {"rates": rates, "against_apart": by_round}


async def measure(arguments: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count() or 1
    engines = [start(arguments, number, gpu=number % gpus) for number in range(arguments.engines)]
    clients: list[Process] = []
    try:
        for first in range(0, len(engines), gpus):  # one that starts counts what is free
            starting = engines[first : first + gpus]
            await asyncio.gather(*(each.generate([1, 2, 3], Sampling(max_tokens=8)) for each in starting))
        for number in range(len(engines)):
            clients.append(await client(arguments, number))
        found = await rounds(engines, clients, arguments)
        (Path(os.environ.get("OUT", ".")) / "pools.json").write_text(json.dumps(found | {"gpus": gpus}))
    finally:
        for each in clients:
            each.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
            await each.wait()
        await asyncio.gather(*(engine.close() for engine in engines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=["measure", "ask"], default="measure")
    parser.add_argument("--engines", type=int, default=2)
    arguments = arguments_of(parser)
    if arguments.engines < 2 or arguments.times < 1:
        parser.error("--engines is at least 2, and --times 1")
    if arguments.what == "ask":
        return asyncio.run(asked_apart(arguments))
    arguments.checkpoint = checkpoint_of(arguments)
    per_gpu = -(-arguments.engines // (torch.cuda.device_count() or 1))
    arguments.share = min(arguments.share, round(0.85 / per_gpu, 2))
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
