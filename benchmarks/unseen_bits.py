"""What the lower 16 bits of bf16 weights are worth that no pass sees: a pretrained model learns sums by SFT.

    python benchmarks/unseen_bits.py [--from WHEELS] [--steps 40]

Three ways with the same batches: weights in float32; in bf16, each beginning somewhere between two steps of bf16
(ops/unseen_bits.py); in bf16, each beginning in the middle, as it is read from a checkpoint. Passes of all three are
computed in float32, so that nothing else differs. Held-out sums are answered greedily, with the weights that computed,
and with all of their bits. `--from`: where benchmarks/real_model.py finds the model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import note, table
from real_model import convert, find_gguf
from tandem.ops.unseen_bits import with_unseen_bits
from tandem.optim.master_weights import round_half_away

ROWS, LR, WINDOW, QUESTIONS = 8, 2e-5, 10, 192
Sum = tuple[str, str]


def sums(seed: int, count: int) -> list[Sum]:
    """Sums and differences of numbers below 100; those of two seeds have nothing in common."""
    rng = random.Random(seed)
    every = [(f"{a} {sign} {b}", str(a + b if sign == "+" else a - b))
             for a in range(100) for b in range(100) for sign in "+-" if (a * 100 + b) % 8 == seed]  # fmt: skip
    return rng.sample(every, count)


class Pupil:
    def __init__(self, path: Path, way: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._way, self._named = way, list(self._model.named_parameters())
        begin: Callable[[str, Tensor], Tensor] = (
            with_unseen_bits if way == "between" else lambda _, exact: exact.clone()
        )
        self._exact = [begin(name, tensor.detach()).requires_grad_() for name, tensor in self._named]

    @torch.no_grad()
    def show(self, *, all_bits: bool) -> None:
        for (_, tensor), exact in zip(self._named, self._exact, strict=True):
            whole = all_bits or self._way == "float32"
            tensor.copy_(exact if whole else round_half_away(exact)[0].view(torch.bfloat16))

    def _asked(self, question: str) -> str:
        chat = [
            {"role": "user", "content": f"State the final answer to the following arithmetic problem: {question} ="}
        ]
        return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _rows(self, texts: Sequence[str]) -> Any:
        return self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    def learn(self, steps: int) -> list[float]:
        """Return the losses."""
        optimizer = torch.optim.AdamW(self._exact, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        shown, losses = sums(1, 1250), list[float]()
        rng = random.Random(1)
        for step in range(steps):
            self.show(all_bits=False)
            batch = rng.sample(shown, ROWS)
            rows = self._rows([f"{self._asked(q)}{q} = {a}{self._tokenizer.eos_token}" for q, a in batch])
            labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
            for label, (question, _) in zip(labels, batch, strict=True):
                asked = len(self._rows([self._asked(question)]).input_ids[0])
                first = int((label >= 0).nonzero()[0])
                label[first : first + asked] = -100
            loss = self._model(**rows, labels=labels).loss
            self._model.zero_grad()
            loss.backward()
            for exact, (_, tensor) in zip(self._exact, self._named, strict=True):
                exact.grad = tensor.grad
            optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def right(self, *, all_bits: bool) -> float:
        self.show(all_bits=all_bits)
        found = 0
        held_out = sums(0, QUESTIONS)
        for start in range(0, QUESTIONS, 64):
            part = held_out[start : start + 64]
            rows = self._rows([self._asked(question) for question, _ in part])
            with torch.inference_mode():
                ids = self._model.generate(**rows, max_new_tokens=16, do_sample=False)
            said = self._tokenizer.batch_decode(ids[:, rows.input_ids.shape[1] :], skip_special_tokens=True)
            found += sum(
                text.rpartition("=")[2].strip() == answer for text, (_, answer) in zip(said, part, strict=True)
            )
        return found / QUESTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    torch.manual_seed(0)
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        convert(find_gguf(asked.source, Path(scratch)), path := Path(scratch) / "model", "bfloat16")
        for way, name in (("float32", "float32"), ("between", "bf16"), ("middle", "bf16, lower bits 0 at first")):
            pupil = Pupil(path, way)
            losses = pupil.learn(asked.steps)
            means = [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, asked.steps, WINDOW)]
            whole = "" if way == "float32" else f"{pupil.right(all_bits=True):.1%}"
            lines.append([name, " ".join(f"{mean:.3f}" for mean in means), f"{pupil.right(all_bits=False):.1%}", whole])
            print(*lines[-1], flush=True)
    note(f"SmolLM2-135M-Instruct, AdamW, learning rate {LR:g} down to 0, {asked.steps} steps of {ROWS} sums, seed 0")
    table(("weights", f"loss, means of {WINDOW} steps", "right", "right with all bits"), lines)


if __name__ == "__main__":
    main()
