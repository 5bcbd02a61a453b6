"""How long vLLM takes to start, and where that goes: `python benchmarks/gpu/start.py cold plain quick few`.

A process of ours starts it each time, with a random checkpoint of the shape. `cold`: an empty compile cache, which the
others find filled. `plain`: as vLLM starts by itself. `forked`: its engine forked from what has imported it, as Tandem
starts it. `quick`: that, and its memory as it was measured by the start before (of whatever share, docs/LOG.md). `few`:
that, and graphs for a third as many batch sizes. `dual`: that, and adapters (`--adapters 2`) on a stream of their own.
Told: seconds until it answers, what its log says whenever a second passed between two lines, and with `--tokens` tokens
a second of 256 requests thereafter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from standing import ask_for_checkpoint, checkpoint_of

from tandem.build import standalone_engines
from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.types import Sampling

SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
PLAIN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_STARTUP_PLAN": "0"}
FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_ENABLE_STARTUP_PLAN": "0"}
QUICK = FORKED | {"VLLM_ENABLE_STARTUP_PLAN": "1"}
FEW = ["--cudagraph-capture-sizes", *map(str, SIZES)]
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "cold": (QUICK, []), "plain": (PLAIN, []), "forked": (FORKED, []), "quick": (QUICK, []), "few": (QUICK, FEW),
    "dual": (QUICK | {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}, FEW),
}  # fmt: skip
LINE = re.compile(r"^(?:\(\S+ pid=\d+\) )?\w+ (\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]]+)\] (.*)")


def gaps(log: Path, began: datetime) -> list[str]:
    """The lines before which a second or more had passed."""
    told, last = list[str](), began
    for line in log.read_text(errors="replace").splitlines():
        if found := LINE.match(line):
            at = datetime.strptime(f"{began.year}-{found[1]}", "%Y-%m-%d %H:%M:%S")
            if (at - last).total_seconds() >= 1:
                told.append(f"{(at - began).total_seconds():4.0f} s  [{found[2]}] {found[3][:110]}")
            last = max(at, last)
    return told


async def rate(process: VllmProcess, requests: int, tokens: int) -> float:
    engine = VllmEngine(process, end_ids=frozenset(), num_ids=0, version=0)

    async def ask(seed: int) -> int:
        prompt = [(31 * seed + 7 * j) % 250 for j in range(128)]
        return len((await engine.generate(prompt, Sampling(max_tokens=tokens, temperature=1.0, seed=seed))).ids)

    await asyncio.gather(*(ask(seed) for seed in range(requests)))
    started = time.perf_counter()
    count = sum(await asyncio.gather(*(ask(seed) for seed in range(requests, 2 * requests))))
    seconds = time.perf_counter() - started
    await engine.close()
    return count / seconds


def measure(way: str, checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    environment, extra = WAYS[way]
    home = Path("/tmp/start") / way
    shutil.rmtree(home, ignore_errors=True)
    options = VllmOptions(
        str(checkpoint), arguments.python, dtype=arguments.dtype, device=arguments.device, max_context=1024,
        memory_share=0.4, max_running=256, eager=arguments.device == "cpu", adapter_slots=arguments.adapters,
        environment=environment, further=extra,
    )  # fmt: skip
    began, started = datetime.now().replace(microsecond=0), time.perf_counter()
    process = VllmProcess(options, home)
    try:
        process.wait_ready(300)
        row: dict[str, Any] = {"way": way, "start_s": time.perf_counter() - started}
        row["log"] = gaps(home / "vllm.log", began)
        if arguments.tokens:
            row["tokens_per_s"] = asyncio.run(rate(process, arguments.requests, arguments.tokens))
        return row
    finally:
        process.kill()
        shutil.copy(home / "vllm.log", Path(os.environ.get("OUT", "."), f"start-{way}.log"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=list(WAYS))
    ask_for_checkpoint(parser, "qwen3-1.7b")
    parser.add_argument("--python", default=standalone_engines.default_python())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapters", type=int, default=0, help="slots")
    parser.add_argument("--tokens", type=int, default=0, help="of each request, to see what decoding lost")
    parser.add_argument("--requests", type=int, default=256)
    arguments = parser.parse_args()
    checkpoint, found = checkpoint_of(arguments), list[dict[str, Any]]()
    for way in arguments.ways:
        row = measure(way, checkpoint, arguments)
        rate_told = f", {row['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in row else ""
        print("\n  ".join([f"{way}: {row['start_s']:.1f} s{rate_told}", *row["log"]]), flush=True)
        found.append(row)
    Path(os.environ.get("OUT", "."), "start.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
