"""What this project promises for H200s: which command of this folder measures it, and how its figure is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

Read = Callable[[Any], float]
SYNC, STEP, TRAIN = "sync_fast.py", "steps.py", "train.py"
LIGHT = "--activations selective --memory-share 0.18"


@dataclass(frozen=True)
class Figure:
    what: str
    unit: str
    read: Read
    must: float
    goal: float
    more: bool = False
    """It must be as much as that, not as little."""

    def verdict(self, value: float) -> str:
        sign = 1 if self.more else -1
        return "goal" if sign * (value - self.goal) >= 0 else "met" if sign * (value - self.must) >= 0 else "MISSED"


@dataclass(frozen=True)
class Measurement:
    name: str
    command: str
    wrote: str
    figures: Sequence[Figure]
    gpus: int = 1


def proven(row: Any) -> Any:
    if "error" in row:
        raise ValueError(row["error"][:300])
    if set(row["verified"]) - {"digest", "identity"}:
        raise ValueError(f"not all versions are proven: {row['verified']}")
    return row


def of_the_first(read: Read) -> Read:
    return lambda rows: read(proven(rows[0]))


def at(*path: str | int) -> Read:
    return lambda found: float(reduce(getitem, path, found))


def first_token(row: Any) -> float:
    """From asking for the load to the token: medians of both."""
    return row["sync_ms"][1] + statistics.median(row["first_token"][-8:])


def paused_with_digests(row: Any) -> float:
    """Return how long requests waited. The engine pauses before the trainer takes its digest and resumes once its own
    agrees, so both lie within; a version is refused where the two differ."""
    if not row["ms"].get("hash"):
        raise ValueError("no digest was taken: sync.digest was off")
    return row["ms"]["paused"]


def second_against_first(rows: Any) -> float:
    """Tokens/s of two cases."""
    first, second = (proven(row)["sampled"] / row["step_s"] for row in rows)
    return second / first


def pooled(count: int) -> Read:
    def read(found: Any) -> float:
        one, many = (statistics.median(found["rates"][name][1:]) for name in ("1", str(count)))
        return many / one

    return read


MEASUREMENTS = [
    Measurement(
        f"broadcast-{shape}", f"{SYNC} broadcast --gpu 1 --eager --share 0.3 --shape qwen3-{shape}",
        f"sync-fast-qwen3-{shape}.json",
        [Figure(f"broadcast {shape.upper()}, paused", "ms", of_the_first(at("ms", "paused")), must, goal)],
        gpus=2,
    )
    for shape, must, goal in (("8b", 90, 60), ("0.6b", 30, 12))
] + [
    Measurement(
        "shared-8b", f"{SYNC} shared --digest --share 0.3 --shape qwen3-8b", "sync-fast-qwen3-8b.json",
        [
            Figure("shared 8B, paused, digests of both ends within", "ms", of_the_first(paused_with_digests), 25, 10),
            Figure("shared 8B, more memory", "MiB", of_the_first(lambda row: max(row["more_mib"])), 156, 156),
        ],
    ),
    Measurement(
        "adapter_broadcast", f"{SYNC} adapter_broadcast --share 0.3 --shape qwen3-8b", "sync-fast-qwen3-8b.json",
        [Figure("adapter_broadcast r16 8B, in all", "ms", of_the_first(at("sync_ms", 1)), 10, 2)],
    ),
    Measurement(
        "adapter", f"{SYNC} adapter --streams 64 --share 0.3 --shape qwen3-1.7b", "sync-fast-qwen3-1.7b.json",
        [
            Figure("adapter r16 1.7B, to the first token", "ms", of_the_first(first_token), 60, 20),
            Figure(
                "64 streams under it, of the base's", "", of_the_first(
                    lambda row: statistics.median(row["tokens_per_s"]) / statistics.median(row["base_tokens_per_s"])
                ), 0.85, 0.95, more=True,
            ),
        ],
    ),
    Measurement(
        "disk", f"{SYNC} disk --share 0.3 --shape qwen3-1.7b", "sync-fast-qwen3-1.7b.json",
        [Figure("disk 1.7B", "s", of_the_first(lambda row: row["sync_ms"][1] / 1e3), 2, 1)],
    ),
    Measurement(
        "restart", f"{SYNC} restart --share 0.3 --shape qwen3-1.7b", "sync-fast-qwen3-1.7b.json",
        [Figure("restart 1.7B, a warm compile cache", "s", of_the_first(lambda row: row["sync_ms"][1] / 1e3), 40, 20)],
    ),
    Measurement(
        "rollouts", "rollouts.py --ways run --times 4 --shape qwen3-1.7b", "rollouts.json",
        [Figure("rollouts 1.7B, 256 x (128 + 512)", "tokens/s", at("run", "rate"), 26_000, 45_000, more=True)],
    ),
    Measurement(
        "step-1.7b",
        f"{STEP} shared {LIGHT} --optimizer adamw_8bit --micro-tokens 8192 --shape qwen3-1.7b",
        "steps-qwen3-1.7b-shared.json",
        [
            Figure("GRPO step 1.7B", "s", of_the_first(at("step_s")), 9.5, 6.5),
            Figure("GRPO step 1.7B, of the GPU", "GiB", of_the_first(at("peak_gib")), 50, 50),
        ],
    ),
    Measurement(
        "step-0.6b", f"{STEP} shared {LIGHT} --micro-tokens 8448 --steps 7 --shape qwen3-0.6b",
        "steps-qwen3-0.6b-shared.json", [Figure("GRPO step 0.6B", "s", of_the_first(at("step_s")), 6, 3.5)],
    ),
    Measurement(
        "step-8b",
        f"{STEP} shared --activations selective --optimizer adamw_8bit --memory-share 0.25 --micro-tokens 4400 "
        "--lr 3e-5 --tokens 256 --steps 20 --shape qwen3-8b",
        "steps-qwen3-8b-shared.json",
        [
            Figure(
                "GRPO 8B, 20 steps: reward, last against first", "",
                of_the_first(lambda row: row["rewards"][19] - row["rewards"][0]), 0.01, 0.1, more=True,
            ),
            Figure("GRPO 8B, of the GPU", "GiB", of_the_first(at("peak_gib")), 135, 90),
        ],
    ),
    Measurement(
        "sft-0.6b", f"{TRAIN} sft-0.6b --ways compiled --tokens 65536 --micro-tokens 32768", "train.json",
        [Figure("SFT 0.6B, packed 4k", "tokens/s", at(0, "tokens_s"), 52_000, 80_000, more=True)],
    ),
    Measurement(
        "sft-8b",
        f"{TRAIN} sft-8b --ways compiled --activations selective --optimizer adamw_8bit --micro-tokens 8192",
        "train.json", [Figure("SFT 8B, all weights", "MFU", at(0, "mfu"), 0.45, 0.55, more=True)],
    ),
    Measurement(
        "optimizer", f"{TRAIN} optimizer", "train.json",
        [Figure("optimizer step 1.7B, of torch's fused AdamW", "", at(0, "ratio"), 1.1, 0.8)],
    ),
] + [
    Measurement(
        name,
        f"{STEP} broadcast broadcast:1 --gpu 1 --memory-share 0.85 --max-running 512 --micro-tokens 16896 "
        f"--on-update {on_update} --shape qwen3-1.7b",
        "steps-qwen3-1.7b-broadcast-broadcast1.json",
        [Figure(f"max_lag 1 against 0, 1.7B, {what}", "", second_against_first, 1.5, 1.9, more=True)], gpus=2,
    )
    for name, on_update, what in (
        ("lag-continue", "continue", "requests going on"), ("lag-finish", "finish", "waiting for requests")
    )
] + [
    Measurement(
        f"engines-{count}", f"pools.py --engines {count} --times 4 --shape qwen3-1.7b", "pools.json",
        [Figure(f"{count} engines behind one pool, against one", "", pooled(count), must, count, more=True)],
        gpus=count,
    )
    for count, must in ((2, 1.9), (4, 3.7))
]  # fmt: skip
