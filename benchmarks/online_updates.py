"""What a version costs an online server: bytes and seconds of an update beside a full checkpoint, and of going back.

python benchmarks/online_updates.py                        a tiny model that really trains, and 1M parameters
python benchmarks/online_updates.py --params 1.7e9 --device cuda --threads 8     any size, with updates like Adam's; it
                                                           needs torch and safetensors alone
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from common import note, table
from tandem.online.version_store import StoredUpdate, VersionStore
from tandem.online.weight_deltas import HeldVersion
from tandem.optim.master_weights import SplitMaster

VERSIONS = 10
ROWS, LENGTH = 8, 128
Tensors = dict[str, Tensor]


@dataclass
class Learner:
    """Weights, and what else a full checkpoint holds."""

    name: str
    live: Tensors
    state: Callable[[], Tensors]
    step: Callable[[], None]
    state_bytes: int = 0
    """Where the state is too large to be written here."""


@dataclass
class Row:
    what: str
    parameters: int
    steps_a_version: int
    changed: float
    update_bytes: float
    weights_bytes: int
    full_bytes: int
    update_s: float
    full_s: float
    reload_s: float
    back_s: float
    forward_s: float
    exact: bool

    @property
    def of_full(self) -> float:
        return self.full_bytes / self.update_bytes

    @property
    def of_weights(self) -> float:
        return self.weights_bytes / self.update_bytes


def real(lr: float) -> Learner:
    """The tiny preset in bf16 with a split master, on pieces of this project's documentation."""
    from tandem.algo import sft
    from tandem.model.cast_precision import narrow
    from tandem.model.policy import CausalPolicy
    from tandem.model.presets import make_model
    from tandem.ops.byte_sizes import shares_never
    from tandem.optim.adamw import AdamW
    from tandem.optim.optimizer import Optimizer
    from tandem.spec.optim import AdamWSpec
    from tandem.text.tokenizer import byte_tokenizer
    from tandem.train.batch_packing import make_batch
    from tandem.train.trainer import PolicyTrainer
    from tandem.types import Trajectory

    tokenizer, master = byte_tokenizer(), SplitMaster()
    module = make_model("tiny", tokenizer, seed=0)
    narrow(module, torch.device("cpu"), master.adopt)
    policy = CausalPolicy(module, tokenizer)
    named, rule = policy.trainable(), AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, master)
    trainer = PolicyTrainer(policy, sft.make(), optimizer, lr=lambda step: lr, clip_norm=1.0)
    text = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    rng = random.Random(0)

    def step() -> None:
        starts = [rng.randrange(len(text) - LENGTH) for _ in range(ROWS)]
        groups = [
            [Trajectory(list(text[at : at + LENGTH]), [False] + [True] * (LENGTH - 1), [0.0] * LENGTH, [-1] * LENGTH)]
            for at in starts
        ]
        device = torch.device("cpu")
        trainer.step(
            make_batch(groups, sft.make(), micro_tokens=ROWS * LENGTH, version=0, shares=shares_never, device=device)
        )

    return Learner("tiny preset, AdamW", dict(named), optimizer.state, step)


def like_adam(parameters: int, device: str, lr: float, dtype: torch.dtype) -> Learner:
    """Normal weights in matrices like a language model's, and a step of about `lr` for each."""
    width = max(64, min(2048, int((parameters / 16) ** 0.5) // 64 * 64))
    shapes: list[tuple[int, int]] = []
    left = parameters
    while left > 0:
        rows = max(1, min(left, 3 * width * width) // width)
        shapes.append((rows, width))
        left -= rows * width
    torch.manual_seed(0)
    master, live = SplitMaster(), Tensors()
    for number, shape in enumerate(shapes):
        exact = torch.randn(shape, device=device) * 0.02
        name = f"layers.{number}.weight"
        live[name] = exact if dtype == torch.float32 else master.adopt(name, exact)

    def step() -> None:
        for name, tensor in live.items():
            value = master.read(name, tensor)
            value += torch.randn_like(value) * lr
            master.write(name, tensor, ..., value, 0)

    moments_bytes = 8 * parameters

    def state() -> Tensors:
        moments = {f"{n}|{key}": torch.zeros(t.shape) for n, t in live.items() for key in ("exp_avg", "exp_avg_sq")}
        return master.state() | moments

    small = parameters < 2e8
    low_bytes = sum(tensor.nbytes for tensor in master.state().values())
    return Learner(
        f"{str(dtype).removeprefix('torch.')}, like Adam's", live, state if small else Tensors, step,
        0 if small else moments_bytes + low_bytes,
    )  # fmt: skip


def timed(device: str, what: Callable[[], object]) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    what()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(learner: Learner, steps: int, device: str, threads: int, directory: Path) -> Row:
    store = VersionStore(directory, threads=threads)
    live, first = learner.live, {name: tensor.clone() for name, tensor in learner.live.items()}
    full = store.anchor(0, live, learner.state())
    held = HeldVersion.of(0, live).at_rest()  # as in the trainer process: on the host, of weights that move

    def move(version: int) -> None:
        with held.using(live):
            store.move(held, version)

    written: list[StoredUpdate] = []
    for version in range(1, VERSIONS + 1):
        for _ in range(steps):
            learner.step()
        written.append(store.update(version, held, live))

    def is_at(wanted: Tensors) -> bool:
        sides = (held.tensors, live)
        return all(torch.equal(side[name].to(device), each) for side in sides for name, each in wanted.items())

    last = {name: tensor.clone() for name, tensor in live.items()}
    exact = is_at(last)
    back, forward = [], []
    for _ in range(3):
        back.append(timed(device, lambda: move(0)))
        exact &= is_at(first)
        forward.append(timed(device, lambda: move(VERSIONS)))
    exact &= is_at(last)
    cold = VersionStore(directory, threads=threads)
    reload_s = timed(device, lambda: cold.load(VERSIONS, device))
    parameters = sum(tensor.numel() for tensor in live.values())
    return Row(
        learner.name, parameters, steps, sum(each.changed for each in written) / VERSIONS / parameters,
        sum(each.size_bytes for each in written) / VERSIONS, sum(tensor.nbytes for tensor in live.values()),
        full.size_bytes + learner.state_bytes, sum(each.seconds for each in written) / VERSIONS, full.seconds,
        reload_s, min(back), min(forward), exact,
    )  # fmt: skip


def show(rows: Sequence[Row]) -> None:
    table(
        ("weights", "steps a version", "changed", "update", "bits a weight", "full / update", "weights / update",
         "write update", "write full", f"back {VERSIONS}", f"forward {VERSIONS}", "reload", "exact"),
        [
            [
                f"{row.what}, {row.parameters / 1e6:.1f}M", str(row.steps_a_version), f"{row.changed:.1%}",
                f"{row.update_bytes / 1e6:.3f} MB", f"{8 * row.update_bytes / row.parameters:.2f}",
                f"{row.of_full:.0f}x", f"{row.of_weights:.1f}x", f"{row.update_s:.3f} s", f"{row.full_s:.3f} s",
                f"{row.back_s:.3f} s", f"{row.forward_s:.3f} s", f"{row.reload_s:.3f} s", "yes" if row.exact else "NO",
            ]
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=1, help="that read and check updates")
    parser.add_argument("--json", action="store_true", help="print numbers, no tables")
    asked = parser.parse_args()
    large = asked.params > 2e8
    plans: list[tuple[Callable[[], Learner], int]] = [
        (lambda: like_adam(int(asked.params), asked.device, asked.lr, torch.bfloat16), 1)
    ]
    if not large:
        plans += [(lambda: like_adam(int(asked.params), asked.device, asked.lr, torch.float32), 1)]
        plans += [(lambda: real(asked.lr), steps) for steps in (1, 8, 32)]
    rows: list[Row] = []
    for make, steps in plans:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(measure(make(), steps, asked.device, asked.threads, Path(scratch) / "versions"))
    if asked.json:
        shares = [{"full_over_update": row.of_full, "weights_over_update": row.of_weights} for row in rows]
        print(json.dumps({"rows": [asdict(row) | more for row, more in zip(rows, shares, strict=True)]}))
        return
    where = f"{asked.device}, {asked.threads} threads"
    note(f"lr {asked.lr:g}, bf16 with a split master, {VERSIONS} versions, {where}; the best of three ways back")
    show(rows)


if __name__ == "__main__":
    main()
