"""Packed against unpacked on conversations of instruction length: gradients, and tokens a second.

python benchmarks/packing.py

Unpacked is what trainers do without packing: the batch's conversations, a row each, padded to the longest of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from common import note, table
from tandem.algo import sft
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.ops.byte_sizes import shares_never
from tandem.ops.packed_attention import pack
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import Batch, Group, MicroBatch, Totals, Trajectory

BATCH, ROUNDS, LONGEST = 32, 5, 1024
CPU = torch.device("cpu")


def conversations(seed: int) -> list[Group]:
    """Log-normal lengths, as instruction data has them: half under 128 tokens, a few near a thousand."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for _ in range(BATCH):
        length = min(LONGEST, max(16, round(rng.lognormvariate(4.85, 0.9))))
        prompt = length // 3
        trained = [index >= prompt for index in range(length)]
        ids = [rng.randrange(256) for _ in range(length)]
        groups.append([Trajectory(ids, trained, [0.0] * length, [-1] * length)])
    return groups


def packed(groups: Sequence[Group]) -> Batch:
    return make_batch(groups, sft.make(), micro_tokens=8192, version=0, shares=shares_never, device=CPU)


def unpacked(groups: Sequence[Group]) -> Batch:
    rows = [group[0] for group in groups]
    width = max(len(row.ids) for row in rows)
    ids_BT, segments_BT = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -1)
    targets, lengths, owners = [], [], []
    for number, row in enumerate(rows):
        ids_BT[number, : len(row.ids)] = torch.tensor(row.ids)
        segments_BT[number, : len(row.ids)] = 0
        targets += [number * width + index for index, trained in enumerate(row.trained) if trained]
        lengths += [row.num_trained] * row.num_trained
        owners += [number] * row.num_trained
    target_N, count = torch.tensor(targets), len(targets)
    micro = MicroBatch(
        ids_BT, torch.arange(width).expand(len(rows), -1), segments_BT, segments_BT,
        pack(segments_BT, segments_BT, CPU), target_N - 1, target_N,
        torch.ones(count), torch.zeros(count), torch.full((count,), -1), torch.tensor(lengths, dtype=torch.float32),
        torch.tensor(owners), torch.arange(len(rows)),
    )  # fmt: skip
    return Batch([micro], Totals(count, len(rows)))


def gradients(policy: CausalPolicy, batch: Batch) -> dict[str, Tensor]:
    for _, tensor in policy.trainable():
        tensor.grad = None
    for micro in batch.micro:
        sft.make().loss(policy.logprobs(micro, 1.0), micro, batch.totals)[0].backward()
    return {name: tensor.grad for name, tensor in policy.trainable() if tensor.grad is not None}


def main() -> None:
    tokenizer = byte_tokenizer()
    rows = []
    for preset in ("tiny", "small"):
        policy = CausalPolicy(make_model(preset, tokenizer, seed=0), tokenizer)
        expected, found = gradients(policy, unpacked(conversations(0))), gradients(policy, packed(conversations(0)))
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        gap = max((found[name] - expected[name]).abs().max().item() for name in expected)
        seconds: dict[str, list[float]] = {"unpacked": [], "packed": []}
        for round_number in range(ROUNDS):
            groups = conversations(1 + round_number)
            for name, make in (("unpacked", unpacked), ("packed", packed)):  # side by side: the machine may be busy
                started = time.perf_counter()
                gradients(policy, make(groups))
                seconds[name].append(time.perf_counter() - started)
        ratio = statistics.median(a / b for a, b in zip(seconds["unpacked"], seconds["packed"], strict=True))
        tokens = sum(len(group[0].ids) for seed in range(1, 1 + ROUNDS) for group in conversations(seed))
        speeds = [f"{tokens / sum(seconds[name]):,.0f}" for name in seconds]
        rows.append([preset, *speeds, f"{ratio:.2f}", f"{gap:.1e} of norm {norm:.2f}"])
    lengths = [len(group[0].ids) for seed in range(1, 1 + ROUNDS) for group in conversations(seed)]
    note(
        f"{BATCH} conversations a step, {statistics.median(lengths):.0f} tokens in the median, "
        f"{statistics.fmean(lengths):.0f} in the mean, {max(lengths)} at most; forward and backward, {ROUNDS} rounds"
    )
    table(("model", "unpacked tokens/s", "packed tokens/s", "ratio (median)", "largest gradient gap"), rows)


if __name__ == "__main__":
    main()
