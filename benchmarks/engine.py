"""The embedded engine beside transformers, same model, same requests, same process, in turns; medians.

    python benchmarks/engine.py [--rounds 7] [--continuous-batching] [--hybrid Qwen3.5]

equal: 128 prompts x 16 tokens.   mixed: 512 requests, nine in ten end at 16 tokens, one in ten at 256.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from common import note, table
from hybrids import small_hybrid
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.model.presets import make_model
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling

PROMPT_TOKENS = 16
SHORT, LONG = 16, 256

Way = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and how many tokens each gets, to the tokens."""


class EndsAt(StoppingCriteria):
    """Each row of a batch ends at a length of its own, as if it had sampled its end of turn there."""

    def __init__(self, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + PROMPT_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


class Ours:
    """One engine for all rounds, as in a run."""

    def __init__(self, module: Any, renderer: Renderer, max_running: int) -> None:
        self._runner = asyncio.Runner()
        num_ids = module.config.vocab_size
        self._engine = EmbeddedEngine(
            module, num_ids=num_ids, end_ids=frozenset(), decode=renderer.decode, max_running=max_running
        )
        self._engine.version = 0

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        async def ask() -> list[Completion]:
            requests = (
                self._engine.generate(prompt, Sampling(max_tokens=length, temperature=0.0))
                for prompt, length in zip(prompts, lengths, strict=True)
            )
            return list(await asyncio.gather(*requests))

        return [completion.ids for completion in self._runner.run(ask())]

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


class Generate:
    """`model.generate` in batches of 128; its default settings, greedy, no logprobs."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(prompts), 128):
            batch, ends = prompts[start : start + 128], lengths[start : start + 128]
            ids = torch.tensor(batch)
            with torch.inference_mode():
                out = self._module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(ends),
                    do_sample=False,
                    eos_token_id=None,
                    stopping_criteria=StoppingCriteriaList([EndsAt(ends)]),
                    logits_processor=LogitsProcessorList(),
                )
            answers += [row[PROMPT_TOKENS : PROMPT_TOKENS + end] for row, end in zip(out.tolist(), ends, strict=True)]
        return answers


class ContinuousBatching:
    """transformers' own, on a copy of the model: it switches the module it is given to paged attention."""

    def __init__(self, module: Any) -> None:
        self._module = copy.deepcopy(module)

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONG)
        with self._module.continuous_batching_context_manager(generation_config=config) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]


def seconds(way: Way, prompts: list[list[int]], lengths: list[int]) -> float:
    started = time.perf_counter()
    way(prompts, lengths)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["equal", "mixed"], help="one case alone")
    parser.add_argument("--continuous-batching", action="store_true", help="also measure transformers' own (slow)")
    parser.add_argument("--hybrid", help="a small one of this name in hybrids.py, in place of the tiny preset")
    args = parser.parse_args()
    tokenizer = byte_tokenizer()
    module = small_hybrid(args.hybrid).eval() if args.hybrid else make_model("tiny", tokenizer, 0).eval()
    renderer = Renderer(tokenizer)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (512, PROMPT_TOKENS), generator=generator).tolist()
    ours = Ours(module, renderer, 128)
    ways: dict[str, Way] = {"model.generate": Generate(module), "tandem": ours}
    if args.continuous_batching:
        ways["continuous batching"] = ContinuousBatching(module)
    cases = {
        "equal": (prompts[:128], [SHORT] * 128, args.rounds * 3),
        "mixed": (prompts, [LONG if index % 10 == 0 else SHORT for index in range(512)], max(3, args.rounds // 2)),
    }
    rows: list[list[str]] = []
    for case, (given, lengths, rounds) in cases.items():
        if args.only not in (None, case):
            continue
        answers = {name: way(given, lengths) for name, way in ways.items()}  # also warms up
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):  # in turns: whatever else the machine does hits all of them
            for name, way in ways.items():
                times[name].append(seconds(way, given, lengths))
        base = statistics.median(times["model.generate"])
        for name, taken in times.items():
            median = statistics.median(taken)
            same = sum(a == b for a, b in zip(answers[name], answers["model.generate"], strict=True))
            tokens = f"{sum(lengths) / median:,.0f}"
            rows.append([case, name, f"{median:.3f}", tokens, f"{base / median:.2f}", f"{same}/{len(given)}"])
    table(["case", "engine", "seconds", "tokens/s", "x generate", "same tokens"], rows)
    ours.close()
    note("must be: equal >= 1.0 x generate; mixed >= 2.5 x generate in batches of 128")


if __name__ == "__main__":
    main()
