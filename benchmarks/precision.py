"""What becomes of small updates: 200 steps of each way to keep bf16 weights, beside a float32 master.

python benchmarks/precision.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import note, table
from tandem.algo import sft
from tandem.model.cast_precision import narrow
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.ops.byte_sizes import shares_never
from tandem.optim import master_weights as masters
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.spec.optim import AdamWSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import Batch, Trajectory

STEPS, ROWS, LENGTH = 200, 8, 128
MASTERS = {
    "fp32": masters.Fp32Copy,
    "split": masters.SplitMaster,
    "stochastic": lambda: masters.Stochastic(0),
    "none": masters.InPlace,
}


def batches(seed: int, count: int) -> list[Batch]:
    """Pieces of this project's own documentation, as bytes."""
    text = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        starts = [rng.randrange(len(text) - LENGTH) for _ in range(ROWS)]
        rows = [list(text[start : start + LENGTH]) for start in starts]
        groups = [[Trajectory(ids, [False] + [True] * (LENGTH - 1), [0.0] * LENGTH, [-1] * LENGTH)] for ids in rows]
        found.append(
            make_batch(
                groups,
                sft.make(),
                micro_tokens=ROWS * LENGTH,
                version=0,
                shares=shares_never,
                device=torch.device("cpu"),
            )
        )
    return found


def train(name: str, lr: float, steps: int) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    module, master = make_model("tiny", tokenizer, seed=0), MASTERS[name]()
    narrow(module, torch.device("cpu"), master.adopt)
    policy = CausalPolicy(module, tokenizer)
    named, rule = policy.trainable(), AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, master)
    trainer = PolicyTrainer(policy, sft.make(), optimizer, lr=lambda step: lr, clip_norm=1.0)

    def exact() -> dict[str, Tensor]:
        return {name: master.read(name, tensor).clone() for name, tensor in named}

    def held_out() -> float:
        return -torch.cat([policy.score(batch.micro[0], 1.0) for batch in batches(1, 8)]).mean().item()

    before, loss_before = exact(), held_out()
    metrics = [trainer.step(batch) for batch in batches(0, steps)]
    return {
        "before": before, "after": exact(), "loss_fell": loss_before - held_out(),
        "lost": sum(each["update/lost_energy"] for each in metrics) / steps,
        "effective": sum(each["update/effective_fraction"] for each in metrics) / steps,
        "served": sum(each["update/served_fraction"] for each in metrics) / steps,
    }  # fmt: skip


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors.values()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print numbers, no tables")
    as_json = parser.parse_args().json
    rows: list[dict[str, Any]] = []
    for lr in (1e-6, 1e-5):
        found = {name: train(name, lr, STEPS) for name in MASTERS}
        goal = flat(found["fp32"]["after"]) - flat(found["fp32"]["before"])
        for name, each in found.items():
            same = all(torch.equal(tensor, found["fp32"]["after"][key]) for key, tensor in each["after"].items())
            # None and stochastic begin with rounded weights: that is no part of the way.
            way = flat(each["after"]) - flat(each["before"])
            rows.append(
                {
                    "lr": lr, "master": name, "same_bits_as_fp32": same, "way": (way @ goal / (goal @ goal)).item(),
                    **{key: each[key] for key in ("effective", "lost", "served", "loss_fell")},
                }
            )  # fmt: skip
    if as_json:
        print(json.dumps({"rows": rows}))
        return
    note(f"tiny preset, AdamW, {STEPS} steps of {ROWS} x {LENGTH} bytes of this project's docs, seed 0; bf16 weights")
    table(
        ("lr", "master", "fp32 bits equal", "of the way", "effective", "lost", "served bits changed", "held-out fell"),
        [
            [
                f"{row['lr']:g}", row["master"], "yes" if row["same_bits_as_fp32"] else "no", f"{row['way']:.1%}",
                f"{row['effective']:.1%}", f"{row['lost']:.1%}", f"{row['served']:.1%}", f"{row['loss_fell']:.4f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
