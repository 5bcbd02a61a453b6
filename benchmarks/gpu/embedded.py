"""Tokens a second of the embedded engine: `benchmarks/gpu/embedded.py smollm2-135m:64 qwen3-1.7b:256 qwen3-1.7b:1`.

SHAPE:STREAMS, random weights in bfloat16; a shape may be one of the hybrids of benchmarks/hybrids.py, for example
Qwen3.5. All requests start together: prompts of `--prompt` ids and `--tokens` new ones each, no end before, temperature
1. `eager`: each step is launched kernel by kernel; `graphs`: engine.eager = false; `apart`: the same, but prompts of
different lengths one length after the other (`--spread N`: the n-th prompt is n modulo N+1 ids shorter); `generate`:
transformers' own, one batch of equal prompts. Each way in turn, once to warm up (graphs are recorded then) and
`--rounds` times; prefill is in the time. Then the largest difference of logprobs between the first two ways where both
drew the same ids. To $OUT/embedded.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from standing import checkpoint_of

from hybrids import FAMILIES, large_hybrid
from tandem.build import built_model, standalone_engines
from tandem.recipes.random_checkpoints import SHAPES
from tandem.spec.engine import HfEngineSpec
from tandem.spec.model import PathModel
from tandem.spec.precision import Bfloat16Precision
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling

WAYS = ("eager", "graphs", "apart", "generate")


def prompts_of(num_ids: int, streams: int, asked: argparse.Namespace) -> list[list[int]]:
    drawn = random.Random(0)
    first = min(300, num_ids // 2)
    lengths = [asked.prompt - number % (asked.spread + 1) for number in range(streams)]
    return [[drawn.randrange(first, num_ids - 1) for _ in range(length)] for length in lengths]


async def answers(engine: Any, num_ids: int, streams: int, asked: argparse.Namespace) -> tuple[float, list[Completion]]:
    prompts = prompts_of(num_ids, streams, asked)
    began = time.perf_counter()
    requests = [engine.generate(prompt, Sampling(asked.tokens, seed=each)) for each, prompt in enumerate(prompts)]
    found = await asyncio.gather(*requests)
    return time.perf_counter() - began, list(found)


def generated(module: Any, num_ids: int, streams: int, asked: argparse.Namespace) -> float:
    ids = torch.tensor(prompts_of(num_ids, streams, asked), device=module.device)
    began = time.perf_counter()
    with torch.inference_mode():
        made = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=asked.tokens,
            min_new_tokens=asked.tokens,
        )  # fmt: skip
    assert made.cpu().shape[1] == asked.prompt + asked.tokens
    return time.perf_counter() - began


def checkpoint(shape: str, device: str) -> Path:
    if shape in SHAPES:
        return checkpoint_of(argparse.Namespace(shape=shape, checkpoint=None, device=device))
    path = Path(tempfile.gettempdir()) / shape
    if not path.exists():
        large_hybrid(shape).save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return path


async def case(shape: str, streams: int, asked: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": shape, "streams": streams}
    given: dict[str, list[Completion]] = {}
    for way in asked.ways:
        device = built_model.pick_device(asked.device)
        model = built_model.model(
            PathModel(path=str(checkpoint(shape, asked.device))), Bfloat16Precision(master="none"), 0, device, 0
        )  # fmt: skip
        if way == "generate":
            module = model.policy.module.eval()
            taken = [generated(module, model.num_ids, streams, asked) for _ in range(asked.rounds + 1)]
            rates = [streams * asked.tokens / seconds for seconds in taken]
            told[way] = {"tokens_per_s": rates[1:], "warming_up": rates[0]}
            say(shape, streams, way, rates)
            del module, model
            continue
        spec = HfEngineSpec(max_running=streams, kv_gib=asked.kv_gib, eager=way == "eager")
        engine: Any = standalone_engines.embedded(spec, model, inline=True)
        engine._end_ids = frozenset()
        if way == "apart":
            engine.passes._most_padding = 0
        rounds = [await answers(engine, model.num_ids, streams, asked) for _ in range(asked.rounds + 1)]
        rates = [streams * asked.tokens / seconds for seconds, _ in rounds]
        given[way] = rounds[-1][1]
        told[way] = {"tokens_per_s": rates[1:], "warming_up": rates[0]}
        option = engine.passes.report.get("graphs", {})
        why = f"; not engaged: {option['why_not']}" if option.get("why_not") else ""
        say(shape, streams, way, rates, why)
        await engine.close()
        del engine, model
        torch.cuda.empty_cache()
    gaps = list[float]()
    for one, other in zip(*given.values(), strict=True) if len(given) == 2 else ():
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.ids, other.ids, strict=True))))
        gaps += [abs(a - b) for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True)]
    told["gap"] = {"most": max(gaps, default=0.0), "mean": statistics.fmean(gaps) if gaps else 0.0, "tokens": len(gaps)}
    print(f"{shape} x {streams}: {told['gap']}", flush=True)
    return told


def say(shape: str, streams: int, way: str, rates: list[float], why: str = "") -> None:
    each = ", ".join(f"{rate:,.0f}" for rate in rates)
    print(f"{shape} x {streams}, {way}: {statistics.median(rates[1:]):,.0f} tokens/s ({each}){why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="SHAPE:STREAMS")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--spread", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=40.0)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    found = list[dict[str, Any]]()
    for each in asked.cases:
        shape, _, streams = each.partition(":")
        if shape not in (*SHAPES, *FAMILIES) or not streams.isdecimal():
            parser.error(f"{each}: is no SHAPE:STREAMS; shapes: {', '.join((*SHAPES, *FAMILIES))}")
        found.append(asyncio.run(case(shape, int(streams), asked)))
        (Path(os.environ.get("OUT", ".")) / "embedded.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
