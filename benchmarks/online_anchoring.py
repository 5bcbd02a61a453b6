"""Ways to teach five facts to a pretrained model that hold its other answers: a table, in plain torch.

What is compared: cross-entropy on the model's own texts, a squared log-ratio of the sampled tokens (k2), the KL
divergence over the whole vocabulary (kl), updates in the whitened space of each layer's inputs (white), and which
weights move. After each, the smallest share of the change at which the lesson is still known is looked for (alpha).

python benchmarks/online_anchoring.py --model DIR [--device cuda] [--budget-s 150] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from online_questions import FACTS, known_questions

Pair = tuple[list[int], list[int]]  # a context, and what follows it


@dataclass(frozen=True)
class Way:
    hold: str = "kl"
    """kl, k2, ce or nothing."""
    texts: str = "self"
    """self: prompts that the model wrote; list: those that Tandem ships; both."""
    weight: float = 1.0
    rows: int = 32
    lr: float = 2e-5
    parts: str = "all"
    """all, or down: the MLPs' down projections of the middle layers."""
    white: float = 0.0
    """Ridge, as a share of the mean variance; 0: not whitened."""
    steps: int = 80
    seed: int = 0


def ways() -> list[Way]:
    plain, white = Way(), Way(hold="", parts="down", white=0.03, lr=1e-3)
    return [
        plain,
        replace(plain, weight=4.0),
        replace(white, lr=5e-4),
        replace(plain, parts="down", lr=1e-4),
        replace(white, hold="kl", lr=5e-4),
        replace(plain, weight=10.0, rows=64),
        replace(white, lr=5e-4, white=0.003),
        replace(plain, texts="both", weight=4.0, rows=64),
        replace(plain, hold="k2", weight=4.0),
        replace(white, hold="kl", weight=4.0, lr=1e-3, white=0.1),
        replace(plain, texts="list"),
        replace(plain, weight=4.0, lr=5e-5),
        replace(plain, hold="ce"),
    ]


class Bench:
    def __init__(self, model: str, device: str, texts: int = 256) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        self.reference.requires_grad_(False)
        self.device, self.end = device, self.tokenizer.eos_token_id
        self.before = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.lesson: list[Pair] = [
            (self.prompt(fact.question.text), [*self.encode(fact.answer), self.end]) for fact in FACTS
        ]
        listed = resources.files("tandem.online").joinpath("ordinary_prompts.txt").read_text().splitlines()
        gate = [self.prompt(text) for text in listed[3::4]]
        own = [self.prompt(text) for number, text in enumerate(listed) if number % 4 != 3]
        self.gate: list[Pair] = list(zip(gate, self.answers(gate, 16, 1.0), strict=True))
        opening = self.prompt("Q7Q7")
        mark = self.encode("user\n")
        at = max(i for i in range(len(opening)) if opening[i : i + len(mark)] == mark) + len(mark)
        asked = self.answers([opening[:at]] * texts, 40, 1.0)
        asked = [ids if ids[-1] == self.end else [*ids, self.end] for ids in asked if len(ids) > 2]
        tail = self.encode("\n<|im_start|>assistant\n")
        written = [[*opening[:at], *ids, *tail] for ids in asked]
        print("written by the model itself:", [self.tokenizer.decode(ids) for ids in asked[:8]], flush=True)
        self.texts: dict[str, list[Pair]] = {}
        for name, prompts in (("self", written), ("list", own)):
            said = self.answers(prompts, 40, 1.0)
            whole = [[*prompt, *ids] for prompt, ids in zip(prompts, said, strict=True)]
            self.texts[name] = [(ids[:at], ids[at:]) for ids in whole]
        self.texts["both"] = self.texts["self"] + self.texts["list"]
        self.gate_before = self.scored(self.gate)
        self.ordinary = known_questions(self.say)
        self._white: dict[float, dict[str, tuple[Tensor, float]]] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.encode(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[list[int]], tokens: int, temperature: float = 0.0, seed: int = 1
    ) -> list[list[int]]:
        torch.manual_seed(seed)
        wide = max(map(len, prompts))
        ids = torch.tensor([[self.end] * (wide - len(row)) + row for row in prompts], device=self.device)
        mask = torch.tensor([[0] * (wide - len(row)) + [1] * len(row) for row in prompts], device=self.device)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        said = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=self.end, pad_token_id=self.end,
            **(how or {"do_sample": False}),
        )  # fmt: skip
        found = said[:, wide:].tolist()
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in found]

    def say(self, texts: list[str], temperature: float, seed: int) -> list[str]:
        said = self.answers([self.prompt(text) for text in texts], 40, temperature, seed)
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in said]

    def rows(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, mask, which positions predict what follows a context, and those ids."""
        wide = max(len(a) + len(b) for a, b in pairs)
        ids = torch.full((len(pairs), wide), self.end)
        mask, chosen = torch.zeros(len(pairs), wide, dtype=torch.long), torch.zeros(len(pairs), wide, dtype=torch.bool)
        for row, (a, b) in enumerate(pairs):
            ids[row, : len(a) + len(b)] = torch.tensor([*a, *b])
            mask[row, : len(a) + len(b)] = 1
            chosen[row, len(a) - 1 : len(a) + len(b) - 1] = True
        next_ids = ids.roll(-1, 1)[chosen]
        return ids.to(self.device), mask.to(self.device), chosen.to(self.device), next_ids.to(self.device)

    def log_p(self, model: Any, ids: Tensor, mask: Tensor, chosen: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return model.lm_head(hidden[chosen]).log_softmax(-1)

    @torch.no_grad()
    def scored(self, pairs: Sequence[Pair]) -> Tensor:
        ids, mask, chosen, following = self.rows(pairs)
        return self.log_p(self.model, ids, mask, chosen).gather(1, following[:, None])[:, 0]

    def kl(self) -> float:
        gap = self.scored(self.gate) - self.gate_before
        return (gap.clamp(max=20).exp() - 1 - gap).mean().item()

    def lowest(self) -> float:
        return self.scored(self.lesson).min().exp().item()

    def whitened(self, names: Sequence[str], ridge: float) -> dict[str, tuple[Tensor, float]]:
        """Of each layer: the inverse root of its inputs' covariance, and the scale of a change."""
        if ridge in self._white:
            return self._white[ridge]
        sums: dict[str, tuple[Tensor, int, float]] = {}
        real: list[Tensor] = []
        hooks = []
        for name in names:

            def keep(module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
                keys, out = inputs[0][real[0]], output[real[0]]
                then, count, power = sums.get(name, (torch.zeros((), device=self.device), 0, 0.0))
                sums[name] = then + keys.T @ keys, count + len(keys), power + out.pow(2).mean(1).sum().item()

            hooks.append(self.reference.get_submodule(name.removesuffix(".weight")).register_forward_hook(keep))
        texts = self.texts["both"]
        with torch.no_grad():
            for first in range(0, len(texts), 64):
                ids, mask, *_ = self.rows(texts[first : first + 64])
                real[:] = [mask.bool()]
                self.reference.model(input_ids=ids, attention_mask=mask)
        for hook in hooks:
            hook.remove()
        found: dict[str, tuple[Tensor, float]] = {}
        for name, (total, count, power) in sums.items():
            values, vectors = torch.linalg.eigh(total / count)
            root = vectors @ torch.diag((values.clamp(min=0) + ridge * values.mean()).rsqrt()) @ vectors.T
            found[name] = root, math.sqrt(power / count / len(root))
        self._white[ridge] = found
        return found

    def train(self, way: Way) -> int:
        rng = random.Random(way.seed)
        live: dict[str, Any] = dict(self.model.named_parameters())
        names = [
            name for name in live
            if way.parts == "all" or (name.endswith("down_proj.weight") and 4 <= int(name.split(".")[2]) < 24)
        ]  # fmt: skip
        for name, tensor in live.items():
            tensor.requires_grad_(name in names)
        white = self.whitened(names, way.white) if way.white else {}
        moving = [torch.zeros_like(live[name]) for name in names] if white else [live[name] for name in names]
        optimizer = torch.optim.Adam(moving, lr=way.lr, foreach=True)
        texts, waiting = self.texts[way.texts], list[Pair]()
        ids, mask, chosen, following = self.rows(self.lesson)
        for step in range(way.steps):
            logprobs = self.log_p(self.model, ids, mask, chosen).gather(1, following[:, None])[:, 0]
            if logprobs.min().exp().item() >= 0.7:
                return step
            self.model.zero_grad()
            (-logprobs.mean()).backward()
            if way.hold:
                while len(waiting) < way.rows:
                    waiting += rng.sample(texts, len(texts))
                held, waiting = waiting[: way.rows], waiting[way.rows :]
                self._hold(way, held).backward()
            if white:
                for name, change in zip(names, moving, strict=True):
                    change.grad = white[name][1] * (live[name].grad @ white[name][0])
            optimizer.step()
            if white:
                with torch.no_grad():
                    for name, change in zip(names, moving, strict=True):
                        live[name].copy_(self.before[name] + white[name][1] * (change @ white[name][0]))
        return way.steps

    def _hold(self, way: Way, held: Sequence[Pair]) -> Tensor:
        ids, mask, chosen, following = self.rows(held)
        now = self.log_p(self.model, ids, mask, chosen)
        if way.hold == "ce":
            return -way.weight * now.gather(1, following[:, None]).mean()
        with torch.no_grad():
            then = self.log_p(self.reference, ids, mask, chosen)
        if way.hold == "k2":
            return way.weight * 0.5 * (now - then).gather(1, following[:, None]).pow(2).mean()
        return way.weight * (then.exp() * (then - now)).sum(1).mean()

    @torch.no_grad()
    def share(self, trained: dict[str, Tensor], alpha: float) -> None:
        for name, tensor in self.model.named_parameters():
            tensor.copy_(torch.lerp(self.before[name], trained[name], alpha))

    def judge(self) -> dict[str, Any]:
        texts = (
            [fact.question.text for fact in FACTS],
            [fact.rephrased for fact in FACTS],
            [q.text for q in self.ordinary],
        )
        said = [
            [
                self.tokenizer.decode(ids, skip_special_tokens=True)
                for ids in self.answers([*map(self.prompt, each)], 40)
            ]
            for each in texts
        ]
        facts = [fact.question for fact in FACTS]
        broken = [(q.text, text) for q, text in zip(self.ordinary, said[2], strict=True) if not q.accepts(text)]
        return {
            "learned": sum(q.accepts(text) for q, text in zip(facts, said[0], strict=True)),
            "rephrased": sum(q.accepts(text) for q, text in zip(facts, said[1], strict=True)),
            "kept": len(self.ordinary) - len(broken), "kl": self.kl(), "lowest": self.lowest(), "broken": broken,
        }  # fmt: skip

    def run(self, way: Way) -> list[dict[str, Any]]:
        self.share(self.before, 0.0)
        torch.manual_seed(way.seed)
        started = time.perf_counter()
        steps = self.train(way)
        trained = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        seconds = time.perf_counter() - started
        found = [{**self.judge(), "alpha": 1.0, "steps": steps, "seconds": seconds}]
        low, high = 0.0, 1.0
        for _ in range(5):
            middle = (low + high) / 2
            self.share(trained, middle)
            low, high = (low, middle) if self.lowest() >= 0.5 else (middle, high)
        self.share(trained, high)
        return [*found, {**self.judge(), "alpha": high, "steps": steps, "seconds": seconds}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    bench = Bench(options.model, options.device)
    print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []

    def take(way: Way) -> None:
        for found in bench.run(way):
            rows.append({"way": asdict(way), **found})
            told = {name: value for name, value in asdict(way).items() if value != getattr(Way(), name)}
            print(
                f"{found['learned']}/5 rephrased {found['rephrased']}/5 kept {found['kept']}/20 kl {found['kl']:.4f} "
                f"alpha {found['alpha']:.2f} steps {found['steps']} lowest {found['lowest']:.2f} "
                f"{found['seconds']:.1f} s   {told}",
                flush=True,
            )
        for question, text in rows[-1]["broken"]:
            print(f"      broke: {question} -> {text[:60]!r}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))

    for way in ways():
        if time.perf_counter() - started < 0.7 * options.budget_s:
            take(way)
    best = sorted(rows, key=lambda row: (-row["learned"], -row["kept"], row["kl"]))
    for row in best[:1]:
        for seed in (1, 2):
            if time.perf_counter() - started < options.budget_s:
                take(Way(**{**row["way"], "seed": seed}))


if __name__ == "__main__":
    main()
