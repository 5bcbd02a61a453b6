"""A trainer of several ranks, as a user starts it: `python benchmarks/gpu/ranks.py sft bytes sums kill --shape SHAPE`.

Each part runs `tandem train` on a random checkpoint of the shape, and reads the run's own metrics:

    sft     SFT with the same number of tokens a GPU on 1, 2, ... ranks: tokens/s, MFU, how it scales, GiB of each rank
    bytes   20 steps with the same batch and `parallel.shares` on 1, 2, ... ranks: which tensors of the export differ;
            `--hosts 2`: also with the most ranks as two hosts, rows within each and sums between them
    sums    what the ordered sums over ranks take of bf16 gradients, beside NCCL's own reduce-scatter of them in fp32
    kill    a rank is killed in a step, in a save and in a publish: how long until the run has ended with its name, and
            what becomes of it when it is resumed on as many ranks, and on one

`--ranks`: by default 1 and every power of two up to the number of GPUs. On a machine without a GPU the shape `tiny`
(the preset) tries all of it but `sums`, with gloo. MFU is of 989 TFLOP/s, the dense bf16 peak of an H100 and an H200.
Details go to $OUT/ranks.json; logs of the runs to $OUT/*.txt.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from standing import checkpoint_of

from common import children_of, note, rank_of, table
from tandem.recipes.random_checkpoints import SHAPES

PEAK_FLOPS = 989e12
WARM = 6
OUT = Path(os.environ.get("OUT", "."))
LONGEST = 2000
MOMENTS = ["step", "save", "publish"]


def lengths_of(count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randint(200, LONGEST) for _ in range(count)]


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    with path.open("w") as file:
        for length in lengths_of(count):
            text = "".join(rng.choice(letters) for _ in range(length - 24))
            file.write(json.dumps({"prompt": "Go on.", "completion": "x" + text}) + "\n")


def spec_of(asked: argparse.Namespace, home: Path, ranks: int, **train: Any) -> dict[str, Any]:
    tiny = asked.shape == "tiny"
    model: dict[str, Any] = {"preset": "tiny"} if tiny else {"path": str(checkpoint_of(asked))}
    if not tiny:
        model |= {"attention": "packed", "compile": asked.compile, "activations": asked.activations}
    if asked.lora:
        model["lora"] = {"rank": 16}
    spec: dict[str, Any] = {
        "recipe": "sft", "name": "ranks", "model": model, "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "parallel": {"ranks": ranks, "gather": asked.gather, "sums": asked.sums, "deadline_s": asked.deadline_s},
        "train": {
            "steps": asked.steps + WARM + asked.trace, "lr": 1e-5, "batch_size": asked.rows,
            "micro_tokens": asked.micro_tokens, "optimizer": {"kind": asked.optimizer}, **train,
        },
        "eval": {"examples": 2}, "checkpoint": {"every": 0},
    }  # fmt: skip
    if asked.trace:
        spec["callbacks"] = [str(Path(__file__).with_name("one_step.py")) + ":OneStep"]
    return spec if tiny else spec | {"precision": {"weights": "bfloat16"}, "deterministic": False}


class Started:
    """`tandem train` in a process of its own."""

    def __init__(self, spec: dict[str, Any], directory: Path, *words: str) -> None:
        import tomli_w

        self.directory, self.log = directory, OUT / f"{directory.name}.txt"
        path = directory.with_suffix(".toml")
        path.write_text(tomli_w.dumps(spec))
        command = [sys.executable, "-m", "tandem", "train", str(path), "--run-dir", str(directory), *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {
                    "PYTHONFAULTHANDLER": "1", "TRACE": str(OUT / f"{directory.name}-trace.json"),
                    "TRACE_AFTER": str(spec["train"]["steps"] - 1),
                },
            )  # fmt: skip
        atexit.register(self.end)

    def ended(self, timeout_s: float) -> int:
        """Its exit code. A run that is not over by then writes the stacks of all ranks to its logs, and ends."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in (*children_of(self.process.pid), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            return self.process.wait(60)
        finally:
            self.keep()

    def measured(self, steps: int, timeout_s: float) -> int:
        """Wait for so many steps, then end the run: what it would still save says nothing of a step. 0 if they came."""
        until = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < until:
            if len(self.rows()) >= steps:
                self.end()
                self.keep()
                return 0
            time.sleep(0.2)
        return self.ended(1)

    def end(self) -> None:
        """Leave no process on a GPU: whatever ran next there would find it full."""
        if self.process.poll() is None:
            for pid in (self.process.pid, *children_of(self.process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def keep(self) -> None:
        found = [*sorted((self.directory / "ranks").glob("*.txt")), self.directory / "metrics.jsonl"]
        for path in (path for path in found if path.exists()):
            shutil.copyfile(path, OUT / f"{self.directory.name}-{path.name}")

    def rows(self) -> list[dict[str, Any]]:
        return self.rows_in(self.directory)

    @staticmethod
    def rows_in(directory: Path) -> list[dict[str, Any]]:
        path = directory / "metrics.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in found if "time/step_s" in row]

    def what_it_said(self) -> str:
        written = self.log.read_text().splitlines()
        lines = [line.strip() for line in written if line.strip() and not line.startswith("Extension modules")]
        told = [line for line in lines if line.startswith("tandem:") or "Error" in line or "RankLost" in line]
        named = [line for line in told if "RankLost" in line]
        return (named or told or lines or ["nothing"])[-1][:300]


def layer_weights(shape: str) -> int:
    config = SHAPES[shape]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = config.get("head_dim", hidden // heads) * (2 * heads + 2 * config["num_key_value_heads"])
    return hidden * (attention + 3 * config["intermediate_size"])


def flops(shape: str, tokens: float, *, lora: bool) -> float:
    """Of a step: 6 for each weight and token, 4 for a frozen one, without adapters' own; and attention's over sequences
    of the benchmark's lengths."""
    config = SHAPES[shape]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    weights = layers * layer_weights(shape) + config["vocab_size"] * config["hidden_size"]
    lengths = lengths_of(2000)
    mean_square = sum(length**2 for length in lengths) / sum(lengths)
    return tokens * ((4 if lora else 6) * weights + 3 * 2 * heads * head_dim * layers * mean_square)


def sft(asked: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for ranks in asked.ranks:
        shutil.rmtree(home / f"sft-{ranks}", ignore_errors=True)
        run = Started(spec_of(asked, home, ranks, batch_size=asked.rows * ranks), home / f"sft-{ranks}")
        code = run.measured(asked.steps + WARM + asked.trace, asked.limit_s)
        rows = run.rows()[WARM : WARM + asked.steps]
        if code or not rows:
            found.append({"ranks": ranks, "failed": run.what_it_said()})
            continue
        seconds = statistics.fmean(row["time/step_s"] for row in rows)
        tokens = statistics.fmean(row["tokens/computed"] for row in rows)
        speed = tokens / seconds  # of all measured steps together: their batches are of unequal length
        mfu = 0.0 if asked.shape == "tiny" else flops(asked.shape, speed, lora=asked.lora) / ranks / PEAK_FLOPS
        found.append(
            {
                "ranks": ranks, "step_s": seconds, "tokens": tokens, "tokens_s": speed, "mfu": mfu,
                "peak_gib": rows[-1]["memory/peak"],
                "imbalance": statistics.fmean(row.get("parallel/imbalance", 0.0) for row in rows),
                "loss": rows[-1]["loss/total"], "steps": [row["time/step_s"] for row in run.rows()],
            }
        )  # fmt: skip
    first = next((row["tokens_s"] / row["ranks"] for row in found if "failed" not in row), 0.0)
    for row in found:
        if "failed" not in row:
            row["times"] = row["tokens_s"] / first
    for path in sorted(OUT.glob("sft-*-trace.json")):
        parts = json.loads(path.read_text())
        print(path.name, *(f"{name} {value:.3f}" for name, value in parts.items() if isinstance(value, float)))
        print("  memory asked of the driver, before and after:", parts["memory"])
        for gap in parts["gaps"][:12]:
            print(f"  no kernel for {gap['ms']:.1f} ms at {gap['at_s']:.3f} s: {gap['host_ms']}")
    print(f"\nSFT {asked.shape}, {asked.rows} rows a GPU, {asked.optimizer}, lora={asked.lora}")
    head = ("ranks", "step", "tokens/s", "times", "MFU", "peak GiB", "imbalance", "loss")
    table(
        head,
        [
            (str(row["ranks"]), row["failed"], *[""] * 6) if "failed" in row else
            (str(row["ranks"]), f"{row['step_s']:.3f} s", f"{row['tokens_s']:,.0f}", f"{row['times']:.2f}",
             f"{row['mfu']:.1%}", f"{row['peak_gib']:.1f}", f"{row['imbalance']:.3f}", f"{row['loss']:.4f}")
            for row in found
        ],
    )  # fmt: skip
    return found


def tensors_of(export: Path) -> dict[str, str]:
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in sorted(export.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                data = file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = hashlib.sha256(data).hexdigest()
    return found


def same_bytes(asked: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    shares = max(asked.ranks)
    before: dict[str, str] = {}
    layouts = [(1, 1)] * asked.again + [(ranks, 1) for ranks in asked.ranks]
    layouts += [(shares, asked.hosts)] if asked.hosts > 1 else []
    for ranks, hosts in layouts:
        spec = spec_of(asked, home, ranks, steps=20, batch_size=asked.rows * shares)
        spec["parallel"] |= {"shares": shares, "hosts": hosts}
        if spec["model"].pop("compile", False):  # the compiler may choose other kernels for other shapes
            spec["model"]["activations"] = "keep"  # `selective` looks at every operation where nothing is compiled
        spec["deterministic"] = True
        directory = home / f"bytes-{ranks}-{hosts}"
        shutil.rmtree(directory, ignore_errors=True)
        run = Started(spec, directory)
        layout = {"ranks": ranks, "hosts": hosts}
        if run.ended(asked.limit_s):
            found.append({**layout, "failed": run.what_it_said()})
            continue
        now = tensors_of(directory / "export")
        losses = [row["loss/total"] for row in run.rows()]
        before = before or now
        differ = [name for name in now if now[name] != before.get(name)]
        same_loss = not found or losses == found[0].get("losses")
        found.append({**layout, "tensors": len(now), "differ": differ, "losses": losses, "same_loss": same_loss})
        shutil.rmtree(directory)
    print(f"\nThe same bytes, {asked.shape}, 20 steps, shares = {shares}, {asked.optimizer}, lora={asked.lora}")
    head = ("ranks", "hosts", "tensors", "that differ", "the first", "equal losses")
    table(
        head,
        [
            (str(row["ranks"]), str(row["hosts"]), row["failed"], "", "", "") if "failed" in row else
            (str(row["ranks"]), str(row["hosts"]), str(row["tensors"]), str(len(row["differ"])),
             (row["differ"] or [""])[0], str(row["same_loss"]))
            for row in found
        ],
    )  # fmt: skip
    return found


def kill(asked: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """The last rank gets SIGKILL in a step, in a save, and in a publish; each run is resumed on as many, and on one."""
    ranks = max(asked.ranks)
    found: list[dict[str, Any]] = []
    for moment in asked.moments:
        number_of_steps = 6 if moment == "publish" else 12
        directory = home / f"kill-{moment}"
        spec = spec_of(asked, home, ranks, steps=number_of_steps)
        spec["checkpoint"] = {"every": 2, "keep_last": 1}
        under_way = {
            "step": lambda directory=directory: len(Started.rows_in(directory)) >= 4,
            "save": lambda directory=directory: any((directory / "checkpoints").glob(".step-*")),
            "publish": lambda: any((home / "sent").glob("*/*/.v-00000[3-9]*")),
        }[moment]
        if moment == "publish":
            (home / "sent").mkdir()
            spec = publishing(spec, home)
        rows = killed_in(moment, spec, directory, ranks, under_way, asked.limit_s)
        print(*rows, sep="\n", flush=True)
        found += rows
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\nA killed rank of {ranks}, {asked.shape}")
    table(
        ("killed in", "what", "seconds", "exit", "processes left", "said"),
        [
            (row["moment"], "failed", "", "", "", row["failed"]) if "failed" in row else
            (row["moment"], row["what"], f"{row['seconds']:.1f}", str(row["exit"]), str(row["left"]), row["said"])
            for row in found
        ],
    )  # fmt: skip
    return found


def publishing(spec: dict[str, Any], home: Path) -> dict[str, Any]:
    """The same trainer in a run of GRPO, whose every step is served by an engine through files."""
    train = {name: spec["train"][name] for name in ("steps", "lr", "micro_tokens", "optimizer")}
    return {name: spec[name] for name in spec if name not in ("data", "eval", "recipe", "train")} | {
        "recipe": "rl", "environment": {"name": str(Path(__file__).with_name("vowels.py"))}, "eval": {"tasks": 2},
        "engine": {"kind": "server", "max_context": 512}, "sync": {"bridge": "disk", "directory": str(home / "sent")},
        "train": train | {"groups_per_step": 4, "group_size": 4, "max_tokens": 24, "max_logprob_gap": 1.0},
    }  # fmt: skip


def killed_in(
    moment: str, spec: dict[str, Any], directory: Path, ranks: int, under_way: Callable[[], bool], limit_s: float
) -> list[dict[str, Any]]:
    shutil.rmtree(directory, ignore_errors=True)
    run = Started(spec, directory)
    until = time.monotonic() + limit_s
    while not under_way() and time.monotonic() < until and run.process.poll() is None:
        time.sleep(0.005)
    family = children_of(run.process.pid)
    victims = [pid for pid in family if rank_of(pid) == ranks - 1]
    if not victims or not under_way():
        run.ended(1)
        return [{"moment": moment, "failed": f"nothing to kill: {run.what_it_said()}"}]
    os.kill(victims[0], signal.SIGKILL)
    killed = time.monotonic()
    code = run.ended(limit_s)
    seconds, said, steps = time.monotonic() - killed, run.what_it_said(), len(run.rows())
    found = [{"moment": moment, "what": f"rank {ranks - 1} killed after {steps} steps", "seconds": seconds}]
    found[0] |= {"exit": code, "said": said, "left": sum(map(alive, family))}
    one = directory.with_name(directory.name + "-one")
    shutil.copytree(directory, one)
    for place, number in ((directory, ranks), (one, 1)):
        started = time.monotonic()
        with (OUT / f"resumed-{place.name}.txt").open("w") as log:
            command = [sys.executable, "-m", "tandem", "resume", str(place), "--set", f"parallel.ranks={number}"]
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT).returncode
        row = {"moment": moment, "what": f"resumed on {number}", "seconds": time.monotonic() - started, "exit": code}
        found.append(row | {"said": f"{len(Started.rows_in(place))} steps", "left": 0})
    shutil.rmtree(one)
    return found


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def sums(asked: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """In processes of their own: `sums_of_rank`."""
    ranks = max(asked.ranks)
    out = home / "sums.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(Path(__file__).resolve()), "--rank-of-sums", str(out), "--shape", asked.shape,
    ]  # fmt: skip
    log = OUT / "sums.txt"
    with log.open("w") as file:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        return [{"failed": log.read_text()[-300:]}]
    row = {"ranks": ranks, **json.loads(out.read_text())}
    print(f"\nSums of one backward pass, {asked.shape}, {ranks} ranks")
    table(
        ("ordered (all-to-all in bf16, then a tree)", "NCCL's reduce-scatter in fp32", "GiB in fp32"),
        [(f"{row['ordered_ms']:.1f} ms", f"{row['nccl_ms']:.1f} ms", f"{row['gib']:.2f}")],
    )
    return [row]


def sums_of_rank(asked: argparse.Namespace) -> None:
    import torch.distributed as dist

    from tandem.train.gradient_tree import tree

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks, config = dist.get_world_size(), SHAPES[asked.shape]
    root = config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
    layers = [layer_weights(asked.shape)] * config["num_hidden_layers"]
    sizes = [size // ranks * ranks for size in (*layers, root)]
    given = {size: torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in set(sizes)}
    wide = {size: each.float() for size, each in given.items()}
    room = {size: torch.empty_like(each) for size, each in given.items()}
    added = {size: each.new_empty(size // ranks) for size, each in wide.items()}

    def ordered() -> None:
        for size in sizes:
            dist.all_to_all_single(room[size], given[size])
            tree([each.float() for each in room[size].view(ranks, -1)])

    def theirs() -> None:
        for size in sizes:
            dist.reduce_scatter_tensor(added[size], wide[size])

    found = {name: timed(work) * 1e3 for name, work in (("ordered_ms", ordered), ("nccl_ms", theirs))}
    if rank == 0:
        Path(asked.rank_of_sums).write_text(json.dumps({**found, "gib": sum(sizes) * 4 / 2**30}))
    dist.destroy_process_group()


def timed(work: Any) -> float:
    seconds = []
    for number in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number > 1:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def powers_up_to(count: int) -> list[int]:
    return [2**power for power in range(10) if 2**power <= max(1, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["sft", "bytes", "sums", "kill"])
    parser.add_argument("--shape", default="qwen3-1.7b", choices=["tiny", *SHAPES])
    parser.add_argument("--checkpoint", type=Path, help="instead of a random one, made once a machine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="that makes it")
    parser.add_argument("--ranks", type=int, nargs="+", default=powers_up_to(torch.cuda.device_count()))
    parser.add_argument("--rows", type=int, default=30, help="conversations a step, for each GPU; 1,100 tokens each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--activations", default="selective")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--hosts", type=int, default=1, help="bytes: also the most ranks as so many hosts")
    parser.add_argument("--moments", nargs="+", default=MOMENTS, choices=MOMENTS, help="kill: when a rank is killed")
    parser.add_argument("--again", action="store_true", help="bytes: one rank twice first")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--gather", default="auto", choices=["auto", "layer", "step"])
    parser.add_argument("--sums", default="auto", choices=["auto", "round", "running", "step"])
    parser.add_argument("--trace", action="store_true", help="sft: profile a step of rank 0 (one_step.py)")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    parser.add_argument("--limit-s", type=float, default=500.0, help="of one run")
    parser.add_argument("--rank-of-sums", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run that is under way, too
    if asked.rank_of_sums:
        sums_of_rank(asked)
        return
    note(f"ranks.py {' '.join(sys.argv[1:])}; {torch.cuda.device_count()} GPUs")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        home = Path(place)
        write_rows(home / "rows.jsonl", 64 * max(asked.ranks) + 200)
        if asked.shape != "tiny":
            checkpoint_of(asked)
        for what in asked.what:
            found[what] = {"sft": sft, "bytes": same_bytes, "sums": sums, "kill": kill}[what](asked, home)
            (OUT / "ranks.json").write_text(json.dumps({"asked": vars(asked), **found}, indent=1))
    failed = [row for rows in found.values() for row in rows if "failed" in row]
    for row in failed:
        print(f"failed: {row}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
