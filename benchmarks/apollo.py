"""Held-out loss of APOLLO and APOLLO-Mini against the best AdamW, and the state that each keeps.

python benchmarks/apollo.py [--seeds 0 1 2] [--steps 500] [--json]

A Qwen3 of 0.4M weights learns to spell a made-up language, whose words are random letters and are followed by few other
words. Every optimizer has the same learning rates to choose from, schedule, batches and first weights; embeddings and
vectors move by AdamW. A learning rate is chosen by held-out loss on the first seed, the other seeds are run with it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import note, table
from tandem.optim.adamw import AdamW
from tandem.optim.apollo import Apollo
from tandem.optim.update_rule import Slot, UpdateRule
from tandem.spec.optim import AdamWSpec, ApolloMiniSpec, ApolloSpec

WORDS, FOLLOWERS, LETTERS = 128, 4, 26
BATCH, LENGTH, HELD_OUT = 8, 64, 128
WARMUP, DECAY, CLIP = 0.1, 0.1, 1.0
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
ALLOWED = {"adamw": (0.0, 1.0), "apollo": (0.03, 1 / 8), "apollo_mini": (0.08, 1 / 100)}
"""Nats over the best AdamW, mean of the seeds; share of AdamW's state."""
SPECS = {"apollo": ApolloSpec(rank=8), "apollo_mini": ApolloMiniSpec()}


@dataclass(frozen=True)
class Run:
    loss: float
    state_share: float
    """Of AdamW's, on the matrices inside the blocks."""
    seconds: float


class Language:
    """Words of two to six letters; after each, one of a few others, the first of them most often."""

    def __init__(self, words: int) -> None:
        draw = torch.Generator().manual_seed(1234)
        sizes = torch.randint(2, 7, (words,), generator=draw).tolist()
        self._words = [[*torch.randint(1, LETTERS + 1, (size,), generator=draw).tolist(), 0] for size in sizes]
        self._followers = torch.randint(words, (words, FOLLOWERS), generator=draw)
        self._odds = 1 / torch.arange(1.0, FOLLOWERS + 1)

    def text(self, length: int, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        ranks = torch.multinomial(self._odds, length, replacement=True, generator=draw).tolist()
        letters: list[int] = []
        word = 0
        for rank in ranks:
            letters += self._words[word]
            word = int(self._followers[word, rank])
            if len(letters) >= length:
                break
        return torch.tensor(letters[:length])


def make_model(seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    more: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 384, "tie_word_embeddings": True}
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=LETTERS + 1, **sizes, **more, **special, dtype="float32"))


def make_rules(kind: str, seed: int, model: Any) -> dict[str, UpdateRule]:
    """Which rule moves which parameter."""
    adamw = AdamW(AdamWSpec())
    matrices = adamw if kind == "adamw" else Apollo(SPECS[kind], seed)
    return {name: matrices if in_block(name, p) else adamw for name, p in model.named_parameters()}


def in_block(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and ".layers." in name


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(kind: str, peak: float, seed: int, steps: int, words: int = WORDS) -> Run:
    started = time.perf_counter()
    language = Language(words)
    batches = language.text(steps * BATCH * LENGTH, seed=seed + 1).view(steps, BATCH, LENGTH)
    model = make_model(seed)
    rules = make_rules(kind, seed, model)
    parameters = dict(model.named_parameters())
    states = {name: rules[name].init(name, parameter) for name, parameter in parameters.items()}
    for step, tokens in enumerate(batches, start=1):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        lr = peak * at(step / steps)
        for name, parameter in parameters.items():
            decay = DECAY if parameter.ndim == 2 else 0.0
            slot = Slot(name, parameter.detach(), parameter.grad, states[name], step, lr, decay)
            rules[name].update([slot])
            parameter.grad = None
    with torch.no_grad():
        loss = loss_of(model, language.text(HELD_OUT * LENGTH, seed=0).view(HELD_OUT, LENGTH)).item()
    matrices = [name for name, parameter in parameters.items() if in_block(name, parameter)]
    kept = sum(tensor.numel() for name in matrices for tensor in states[name].values())
    share = kept / sum(2 * parameters[name].numel() for name in matrices)
    return Run(loss if math.isfinite(loss) else math.inf, share, time.perf_counter() - started)


def at(progress: float) -> float:
    """Share of the peak: up in a line, then down along half a cosine, to a tenth."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


class Measured:
    """Runs, each made once."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._runs: dict[tuple[str, float, int], Run] = {}

    def run(self, kind: str, peak: float, seed: int) -> Run:
        key = (kind, peak, seed)
        if key not in self._runs:
            self._runs[key] = train(kind, peak, seed, self._steps)
        return self._runs[key]

    def best(self, kind: str, seed: int) -> float:
        return min(LEARNING_RATES, key=lambda peak: self.run(kind, peak, seed).loss)

    def mean(self, kind: str, peak: float, seeds: Sequence[int]) -> float:
        return statistics.fmean(self.run(kind, peak, seed).loss for seed in seeds)


def measure(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """What `--json` prints."""
    measured = Measured(steps)
    best = {kind: measured.best(kind, seeds[0]) for kind in ALLOWED}
    aim = measured.mean("adamw", best["adamw"], seeds)
    found: dict[str, Any] = {}
    for kind, (nats, state) in ALLOWED.items():
        runs = [measured.run(kind, best[kind], seed) for seed in seeds]
        gap = measured.mean(kind, best[kind], seeds) - aim
        found[kind] = {
            "lr": best[kind],
            "losses": [run.loss for run in runs],
            "gap": gap,
            "gap_at_adamw_lr": measured.mean(kind, best["adamw"], seeds) - aim,
            "state_share": runs[0].state_share,
            "as_promised": gap <= nats and runs[0].state_share <= state,
            "grid": {f"{peak:g}": measured.run(kind, peak, seeds[0]).loss for peak in LEARNING_RATES},
        }
    return found


def report(found: dict[str, Any], steps: int) -> None:
    rows = []
    for kind, row in found.items():
        losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
        gaps = [f"{row[key]:+.3f}" for key in ("gap", "gap_at_adamw_lr")]
        promise = f"{ALLOWED[kind][0]:+.2f}, 1/{1 / ALLOWED[kind][1]:.0f}"
        state = f"1/{1 / row['state_share']:.0f}"
        rows.append([kind, f"{row['lr']:g}", losses, *gaps, state, promise, "yes" if row["as_promised"] else "NO"])
    table(["optimizer", "best lr", "held-out loss", "gap", "at AdamW's lr", "state", "promised", "kept"], rows)
    print()
    grid = [[kind, *(f"{loss:.3f}" for loss in row["grid"].values())] for kind, row in found.items()]
    table(["first seed, by lr", *(f"{peak:g}" for peak in LEARNING_RATES)], grid)
    note(f"nats a letter after {steps} steps; gap: mean over the seeds, less the best AdamW's")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="print numbers, no tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.seeds, options.steps)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        report(found, options.steps)


if __name__ == "__main__":
    main()
