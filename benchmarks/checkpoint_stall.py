"""How long a save keeps the training thread: SFT of the presets, on a CPU, a checkpoint every ten steps.

The stall is what the thread spends on a save: waiting for the one before, and copying. What a save costs besides is
that its writer computes digests while the next step is under way: that shows in the steps after a save. Exit code 1 if
a stall is over a twentieth of a step, in the median of a preset.

python benchmarks/checkpoint_stall.py [--presets tiny small] [--steps 60]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from common import note, table

EVERY, MOST = 10, 0.05


def spec_of(home: Path, preset: str, steps: int) -> dict[str, Any]:
    words = " ".join(["so it goes"] * 12)
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} {words}"}] for n in range(200)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return {
        "recipe": "sft",
        "device": "cpu",
        "model": {"preset": preset},
        "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "train": {"steps": steps, "lr": 1e-4, "batch_size": 8},
        "eval": {"examples": 4},
        "checkpoint": {"every": EVERY},
    }


def measured(home: Path, preset: str, steps: int) -> dict[str, float]:
    """Seconds, of the run after its first save."""
    from tandem import recipes
    from tandem.obs.live_view import LiveView
    from tandem.spec.load import parse_spec

    home.mkdir()
    view = LiveView(preset, Console(file=io.StringIO()))
    run = recipes.run(parse_spec(spec_of(home, preset, steps)), home / "run", view=view)
    metrics, events = (_rows(run.directory / name) for name in ("metrics.jsonl", "events.jsonl"))
    saves = [event for event in events if event["stage"] == "checkpoint"][1:-1]  # the last is waited for
    took = {row["step"]: row["time/step_s"] for row in metrics}
    after = {step for save in saves for step in (save["step"] + 1, save["step"] + 2)}
    usual = [took[step] for step in took if step > EVERY + 2 and step not in after]
    return {
        "step": statistics.median(usual),
        "stall": statistics.median(save["stall_s"] for save in saves),
        "longest": max(save["stall_s"] for save in saves),
        "write": statistics.median(save["write_s"] for save in saves),
        "after": statistics.median(took[step] for step in after),
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--presets", nargs="+", default=["tiny", "small"])
    asked.add_argument("--steps", type=int, default=60)
    options = asked.parse_args()
    rows, missed = list[list[str]](), False
    with tempfile.TemporaryDirectory() as root:
        for preset in options.presets:
            found = measured(Path(root) / preset, preset, options.steps)
            missed |= found["stall"] > MOST * found["step"]
            milliseconds = [f"{1000 * found[name]:.2f}" for name in ("step", "stall", "longest", "write", "after")]
            rows.append([preset, *milliseconds, f"{found['stall'] / found['step']:.1%}"])
    head = ["SFT of", "a step, ms", "stall, ms", "longest", "written in, ms", "a step after, ms", "stall of a step"]
    table(head, rows)
    note(f"checkpoint.every = {EVERY}; must be: a stall of at most {MOST:.0%} of a step")
    sys.exit(missed)


if __name__ == "__main__":
    main()
