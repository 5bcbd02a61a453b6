"""The fused lm-head on one GPU: right, how much memory, and how long beside its own four matrix products.

    PYTHONPATH=src python benchmarks/gpu/head.py --out results

Needs torch and triton. A ratio is against the faster of two ways to make the four products (logits, logits again,
gradient of the hidden states, gradient of the weight) in bf16 and nothing else: whole, and in pieces as large as ours.
All are timed in turns, so that a clock that drops drops for each of them.

Predicted for 65,536 tokens, hidden 2048, vocabulary 151,936 on an H200 (4.3 TB/s, 720 TFLOP/s on such shapes):
four products 227 ms. Ours on top: fp32 instead of bf16 out of the two logit products 12 ms, a pass over the logits in
forward 40 GB, 10 ms, in backward 60 GB, 15 ms, the hidden states' gradient 50 times to and fro 54 GB, 6 to 13 ms, and
3 ms for the rest: 275 ms, 1.2 times; 1.77 GB held. With bf16 logits 250 ms, 1.1 times. With half of the workspace
(four times the blocks, as the sum of 0.54 GB stays) 310 ms, 1.4 times.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.ops import byte_sizes
from tandem.ops import fused_logprobs as ops

DEVICE = "cuda"
GB = 1e9


@dataclass(frozen=True)
class Variant:
    logits: str
    workspace_gb: float

    @property
    def name(self) -> str:
        return f"fused, {self.logits} logits, {self.workspace_gb:g} GB"

    @contextmanager
    def engaged(self) -> Iterator[None]:
        before = ops._logits_dtype
        if self.logits == "bf16":
            ops._logits_dtype = lambda tensor: tensor.dtype
        try:
            yield
        finally:
            ops._logits_dtype = before


@dataclass(frozen=True)
class Case:
    hidden_NH: Tensor
    weight_VH: Tensor
    ids_N: Tensor
    grad_N: Tensor
    num_ids: int

    @classmethod
    def random(cls, tokens: int, hidden: int, vocab: int, num_ids: int) -> Case:
        torch.manual_seed(0)
        return cls(
            torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_(),
            (torch.randn(vocab, hidden, device=DEVICE) * 3 / hidden**0.5).bfloat16().requires_grad_(),
            torch.randint(0, num_ids, (tokens,), device=DEVICE),
            torch.randn(tokens, device=DEVICE) / tokens,
            num_ids,
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden_NH, self.weight_VH]

    def fused(self, variant: Variant) -> list[Tensor]:
        with variant.engaged():
            logprobs_N, entropy_N = self.scored(variant)
            return [logprobs_N.detach(), entropy_N, *torch.autograd.grad(logprobs_N, self.leaves, self.grad_N)]

    def forward_only(self, variant: Variant) -> None:
        with variant.engaged(), torch.no_grad():
            self.scored(variant)

    def scored(self, variant: Variant) -> tuple[Tensor, Tensor]:
        return ops.score(
            self.hidden_NH,
            self.weight_VH,
            self.ids_N,
            num_ids=self.num_ids,
            workspace_bytes=int(variant.workspace_gb * GB),
        )

    def naive(self, dtype: torch.dtype) -> list[Tensor]:
        """All logits at once: the model's own in bf16, then what `dtype` is."""
        if dtype == torch.float64:
            leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        else:
            leaves = self.leaves
        logprobs_NV = (leaves[0] @ leaves[1].t())[:, : self.num_ids].to(dtype).log_softmax(-1)
        logprobs_N = logprobs_NV.gather(1, self.ids_N[:, None]).squeeze(1)
        entropy_N = -(logprobs_NV.detach().exp() * logprobs_NV.detach()).sum(-1)
        return [logprobs_N.detach(), entropy_N, *torch.autograd.grad(logprobs_N, leaves, self.grad_N.to(dtype))]


# --- right


def correctness(variants: list[Variant]) -> list[dict[str, Any]]:
    """Distance from float64 over its norm. bf16 alone puts 1.7e-3 on a gradient."""
    found: list[dict[str, Any]] = []
    for tokens, hidden, vocab, num_ids in (
        (777, 256, 5000, 5000),
        (1024, 512, 20_001, 19_990),
        (33, 2048, 151_936, 151_669),
    ):
        case = Case.random(tokens, hidden, vocab, num_ids)
        exact, naive = case.naive(torch.float64), case.naive(torch.float32)
        ways = {"eager": naive, **{variant.name: case.fused(variant) for variant in variants}}
        small = Variant(variants[0].logits, tokens * vocab * 2 / GB)
        ways[f"{variants[0].logits}, many pieces"] = case.fused(small)
        for name, ours in ways.items():
            distances = [
                ((our.double() - their).norm() / their.norm()).item() for our, their in zip(ours, exact, strict=True)
            ]
            found.append({"shape": [tokens, hidden, vocab, num_ids], "way": name, "distances": distances})
    return found


# --- how much


def extra_bytes(call: Callable[[], Any], gradients: int) -> int:
    """The peak, less what was there before and the gradients that stay."""
    call()  # kernels compiled, the matrix library's own workspace taken
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - gradients


# --- how long


class Products:
    """The four matrix products, bf16 in and out."""

    def __init__(self, case: Case) -> None:
        self._hidden_NH, self._weight_VH = (leaf.detach() for leaf in case.leaves)
        tokens, vocab = len(self._hidden_NH), len(self._weight_VH)
        self._logits_NV = torch.empty(tokens, vocab, device=DEVICE, dtype=torch.bfloat16)
        self._hidden_grad_NH, self._weight_grad_VH = (torch.empty_like(leaf) for leaf in case.leaves)
        self._chunks = list(byte_sizes.pieces(tokens, 4096, 256))
        self._blocks = list(byte_sizes.pieces(vocab, 4096, 256))

    def whole(self) -> None:
        for _ in range(2):
            torch.mm(self._hidden_NH, self._weight_VH.t(), out=self._logits_NV)
        torch.mm(self._logits_NV, self._weight_VH, out=self._hidden_grad_NH)
        torch.mm(self._logits_NV.t(), self._hidden_NH, out=self._weight_grad_VH)

    def in_pieces(self) -> None:
        """Into buffers as large as ours."""
        flat = self._logits_NV.view(-1)
        tokens, vocab = self._logits_NV.shape
        for chunk in self._chunks:
            logits_CV = flat[: (chunk.stop - chunk.start) * vocab].view(-1, vocab)
            torch.mm(self._hidden_NH[chunk], self._weight_VH.t(), out=logits_CV)
        for block in self._blocks:
            logits_NB = flat[: (block.stop - block.start) * tokens].view(tokens, -1)
            torch.mm(self._hidden_NH, self._weight_VH[block].t(), out=logits_NB)
            self._hidden_grad_NH.addmm_(logits_NB, self._weight_VH[block])
            torch.mm(logits_NB.t(), self._hidden_NH, out=self._weight_grad_VH[block])


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; the first round is warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if number:
                times[name].append(start.elapsed_time(end))
    return times


def liger(case: Case) -> Callable[[], Any] | None:
    """Liger's fused linear cross-entropy: one loss, no entropy, logits in bf16."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction as Function,
        )
    except ImportError:
        return None

    def call() -> Any:
        loss: Any = Function.apply(case.hidden_NH, case.weight_VH, case.ids_N)
        return torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, case.leaves)

    return call


def kernels(call: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Name, launches and milliseconds of the kernels, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [(each.key, each.count, each.self_device_time_total / 1e3) for each in profile.key_averages()]
    return sorted(found, key=lambda each: -each[2])[:12]


# --- the table


def measure(args: argparse.Namespace) -> dict[str, Any]:
    variants = [Variant(*each) for each in args.variants]
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "args": vars(args)}
    result["correctness"] = correctness(variants)
    case = Case.random(args.tokens, args.hidden, args.vocab, args.num_ids)
    gradients = sum(leaf.nbytes for leaf in case.leaves)
    result["extra_gb"] = {
        variant.name: extra_bytes(lambda variant=variant: case.fused(variant), gradients) / GB for variant in variants
    }
    few = Case.random(args.eager_tokens, args.hidden, args.vocab, args.num_ids)
    eager = f"eager, {args.eager_tokens} tokens"
    result["extra_gb"][eager] = extra_bytes(lambda: few.naive(torch.float32), gradients) / GB
    result["kernels"] = kernels(lambda: case.fused(variants[0]))
    calls: dict[str, Callable[[], Any]] = {
        variant.name: lambda variant=variant: case.fused(variant) for variant in variants
    }
    calls[f"{variants[0].name}, forward only"] = lambda: case.forward_only(variants[0])
    calls[eager] = lambda: few.naive(torch.float32)
    if call := liger(case):
        calls["liger"] = call
        result["extra_gb"]["liger"] = extra_bytes(call, gradients) / GB
    products = Products(case)
    calls["four products, whole"], calls["four products, in pieces"] = products.whole, products.in_pieces
    torch.cuda.empty_cache()
    result["times_ms"] = in_turns(calls, args.rounds)
    return result


def show(result: dict[str, Any]) -> None:
    args = result["args"]
    print(f"{result['device']}, torch {result['torch']}\n")
    print("distance from float64: logprobs, entropy, gradient of hidden states, gradient of weight")
    for row in result["correctness"]:
        print(f"  {row['shape']!s:28} {row['way']:34}" + " ".join(f"{each:9.1e}" for each in row["distances"]))
    print(f"\nkernels of {Variant(*args['variants'][0]).name}")
    for name, count, milliseconds in result["kernels"]:
        print(f"  {milliseconds:8.2f} ms {count:5d} x {name[:90]}")
    medians = {name: statistics.median(times) for name, times in result["times_ms"].items()}
    floor = min(medians["four products, whole"], medians["four products, in pieces"])
    flop = 4 * 2 * args["tokens"] * args["hidden"] * args["vocab"]
    print(f"\n{args['tokens']} tokens, hidden {args['hidden']}, vocabulary {args['vocab']}, forward and backward")
    print(f"four products: {flop / 1e12:.0f} TFLOP, {flop / floor / 1e9:.0f} TFLOP/s; limits: 1.40 times, 2.00 GB")
    print(f"| {'way':40} | {'ms':>7} | {'spread':>13} | {'times':>5} | {'extra GB':>8} |")
    for name, times in result["times_ms"].items():
        ratio = f"{medians[name] / floor:5.2f}" if "eager" not in name else "    -"
        extra = f"{result['extra_gb'][name]:8.2f}" if name in result["extra_gb"] else "       -"
        print(f"| {name:40} | {medians[name]:7.1f} | {min(times):6.1f}-{max(times):6.1f} | {ratio} | {extra} |")
    if "liger" not in medians:
        print("liger: not installed")


def variant_of(text: str) -> tuple[str, float]:
    logits, _, workspace_gb = text.partition(":")
    if logits not in ("fp32", "bf16"):
        raise argparse.ArgumentTypeError(f"'{text}': a variant is fp32:GB or bf16:GB")
    return logits, float(workspace_gb or ops.WORKSPACE_BYTES / GB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--num-ids", type=int, default=151_669)
    parser.add_argument("--eager-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", type=variant_of, nargs="+", default=[("fp32", 1.8), ("fp32", 0.9), ("bf16", 1.8)])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "head.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    show(result)


if __name__ == "__main__":
    main()
