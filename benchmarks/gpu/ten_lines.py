"""A spec of ten lines beside one that is tuned by hand: `python benchmarks/gpu/ten_lines.py grpo sft`.

The ten lines name a model, the work and the optimizer, and leave the rest to the machine (docs/defaults.md); the other
spec has the settings of the tuned rows of docs/PERFORMANCE.md. Both are started with `tandem train`, one after the
other, the ten lines first and again last. Tokens a second are of all steps after WARM, of each run's own metrics:
sampled ones for GRPO, computed ones for SFT. `tandem engine install vllm` must have been run here, or vllm_here.sh.

The exit code is 1 if a run failed. Details go to $OUT/ten_lines.json, logs of the runs to $OUT/*.txt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import OUT, Started, write_rows
from standing import ask_for_checkpoint, checkpoint_of

from common import note, table

WARM = {"grpo": 3, "sft": 8}
ASKED_STEPS = 100
"""What a user asks for; it decides whether compiling pays. The run is ended once enough steps are measured."""


def ten_lines(what: str, checkpoint: Path, rows: Path, optimizer: str) -> dict[str, Any]:
    train: dict[str, Any] = {"steps": ASKED_STEPS, "lr": 1e-6, "optimizer": {"kind": optimizer}}
    if what == "sft":
        return {
            "recipe": "sft", "model": {"path": str(checkpoint)}, "data": {"kind": "file", "path": str(rows)},
            "train": {**train, "batch_size": 60},
        }  # fmt: skip
    vowels = str(Path(__file__).with_name("vowels.py"))
    return {
        "recipe": "rl", "model": {"path": str(checkpoint)}, "environment": {"name": vowels},
        "train": {**train, "groups_per_step": 32, "group_size": 8, "max_tokens": 512},
    }  # fmt: skip


def tuned(what: str, checkpoint: Path, rows: Path, optimizer: str) -> dict[str, Any]:
    spec = ten_lines(what, checkpoint, rows, optimizer)
    spec["model"] |= {"attention": "packed", "compile": True, "activations": "selective"}
    spec |= {"precision": {"weights": "bfloat16"}, "deterministic": False, "checkpoint": {"every": 0}}
    spec["train"]["micro_tokens"] = 16384 if what == "sft" else 8192
    if what == "grpo":
        spec["engine"] = {"kind": "vllm", "memory_share": 0.18, "max_running": 256, "max_context": 1024}
        spec["sync"] = {"bridge": "shared"}
        spec["train"] |= {"replace_equal_groups": 0, "max_logprob_gap": 0.3}
    return spec


def measured(name: str, what: str, spec: dict[str, Any], home: Path, steps: int, limit_s: float) -> dict[str, Any]:
    directory = home / f"{what}-{name.replace(' ', '-')}"
    run = Started(spec, directory)
    code = run.measured(WARM[what] + steps, limit_s)
    shutil.copyfile(directory / "events.jsonl", OUT / f"{directory.name}-events.jsonl")
    rows = run.rows()[WARM[what] : WARM[what] + steps]
    shutil.rmtree(directory, ignore_errors=True)
    if code or not rows:
        return {"what": what, "spec": name, "failed": run.what_it_said()}
    column = "tokens/computed" if what == "sft" else "tokens/sampled"
    seconds = [row["time/step_s"] for row in rows]
    rate = statistics.fmean(row[column] for row in rows) / statistics.fmean(seconds)
    peak = max(row["memory/peak"] for row in rows)
    return {"what": what, "spec": name, "step_s": seconds, "rate": rate, "trainer_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(WARM))
    ask_for_checkpoint(parser, "qwen3-1.7b")
    parser.add_argument("--optimizer", default="adamw_8bit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=280.0, help="of one run")
    asked = parser.parse_args()
    note(f"ten_lines.py {' '.join(sys.argv[1:])}")
    checkpoint, found = checkpoint_of(asked), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        home = Path(place)
        write_rows(home / "rows.jsonl", 300)
        for what in asked.what:
            made = (checkpoint, home / "rows.jsonl", asked.optimizer)
            specs = {
                "ten lines": ten_lines(what, *made), "tuned": tuned(what, *made),
                "ten lines again": ten_lines(what, *made),
            }  # fmt: skip
            for name, spec in specs.items():
                found.append(measured(name, what, spec, home, asked.steps, asked.limit_s))
                print(json.dumps(found[-1]), flush=True)
                (OUT / "ten_lines.json").write_text(json.dumps(found, indent=1))
    by_hand = {row["what"]: row["rate"] for row in found if row["spec"] == "tuned" and "failed" not in row}
    table(
        ("what", "spec", "tokens/s", "of the tuned", "step", "trainer GiB"),
        [
            (row["what"], row["spec"], row["failed"], "", "", "") if "failed" in row else
            (row["what"], row["spec"], f"{row['rate']:,.0f}", f"{row['rate'] / by_hand.get(row['what'], 1):.2f}",
             f"{statistics.median(row['step_s']):.2f} s", f"{row['trainer_gib']:.1f}")
            for row in found
        ],
    )  # fmt: skip
    sys.exit(any("failed" in row for row in found))


if __name__ == "__main__":
    main()
