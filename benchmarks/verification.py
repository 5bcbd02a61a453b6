"""What verification costs of a step on a CPU: examples/quickstart.toml, with an engine in its own process or without.
All runs go on from one short warm-up.

python benchmarks/verification.py [--runs 3] [--steps 10] [bridge ...]

Digests of both ends and the canary, as the ledger has them, in the median version; against the median step. Of what the
engine digests on arrival, `arrival`, no phase tells alone: with a meeting it is all of `confirm`, messages included;
with files, all of the engine's `wait` that is left when the trainer has written, reading included. So shares are upper
bounds. The runs of all bridges take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tandem
from common import note, table
from tandem.obs.sync_report import AT_THE_TRAINER
from tandem.spec.load import parse_spec

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"
BRIDGES = ("inproc", "shared", "broadcast", "disk")
PROVING = ("hash", "arrival", "verify", "canary")
SETTLED = 2  # the first versions and steps start and compile things


def spec_of(bridge: str, steps: int, seed: int, warm: Path | None = None) -> Any:
    raw = tomllib.loads(QUICKSTART.read_text())
    raw |= {"device": "cpu", "seed": seed, "eval": {"tasks": 16}, "sync": {"bridge": bridge}}
    raw["engine"] = {"kind": "hf" if bridge == "inproc" else "server"}
    if warm is None:
        raw["warmup"]["steps"] = 150
    else:
        raw["model"] = {"path": str(warm)}
        del raw["warmup"]
    raw["train"] |= {"steps": steps, "replace_equal_groups": 0}
    return parse_spec(raw)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def proving(seconds: Mapping[str, float]) -> dict[str, float]:
    written = sum(seconds.get(phase, 0.0) for phase in AT_THE_TRAINER)
    arrival = seconds.get("confirm", seconds["wait"] - written if written else 0.0)
    return {**{name: seconds.get(name, 0.0) for name in PROVING}, "arrival": max(0.0, arrival)}


def measure(spec: Any, home: Path) -> tuple[dict[str, float], list[str]]:
    tandem.run(spec, run_dir=home)
    trained = [row for row in rows(home / "metrics.jsonl") if "time/generate_s" in row][SETTLED:]
    proofs = rows(home / "sync.jsonl")[SETTLED:]
    found = [proving(proof["seconds"]) for proof in proofs]
    times = {name: statistics.median(row[f"time/{name}_s"] for row in trained) for name in ("step", "sync")}
    times |= {name: statistics.median(each[name] for each in found) for name in PROVING}
    times["all"] = statistics.median(sum(each.values()) for each in found)
    return times, sorted({proof["verified"] for proof in proofs})


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("bridges", nargs="*", default=BRIDGES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[dict[str, float], list[str]]]] = {bridge: [] for bridge in arguments.bridges}
    with tempfile.TemporaryDirectory() as root:
        tandem.run(spec_of("inproc", 2, 0), run_dir=Path(root) / "warm-up")
        for run in range(arguments.runs):
            for bridge in arguments.bridges:
                spec = spec_of(bridge, arguments.steps, run, Path(root) / "warm-up" / "export")
                found[bridge].append(measure(spec, Path(root) / f"{bridge}-{run}"))
    lines: list[list[str]] = []
    for bridge, runs in found.items():
        middle = {name: statistics.median(times[name] for times, _ in runs) for name in runs[0][0]}
        shares = sorted(times["all"] / times["step"] for times, _ in runs)
        ms = [f"{middle[name] * 1e3:.1f}" if middle[name] else "" for name in ("sync", *PROVING)]
        verified = ", ".join(sorted({each for _, names in runs for each in names}))
        share = f"{statistics.median(shares):.2%} ({shares[0]:.2%} to {shares[-1]:.2%})"
        lines.append([bridge, verified, f"{middle['step']:.2f}", *ms, share])
    table(["bridge", "verified", "step s", "sync ms", *PROVING, "share of the step"], lines)
    note(f"medians of {arguments.runs} runs of {arguments.steps} steps each, seeds from 0; must be: at most 2 %")


if __name__ == "__main__":
    main()
