"""`tandem train` as a user starts it, for tests that look at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from tandem.cli.main import app

TANDEM = [sys.executable, "-m", "tandem"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_spec(home: Path, steps: int = 6) -> Path:
    rows = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "yes " * (1 + n % 5)}]
        for n in range(40)
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    spec = home / "mine.toml"
    spec.write_text(
        f"""
recipe = "sft"
[model]
preset = "tiny"
[data]
kind = "file"
path = "{home / "rows.jsonl"}"
[train]
steps = {steps}
lr = 1e-3
batch_size = 6
micro_tokens = 128
[checkpoint]
every = 2
[parallel]
shares = 2
deadline_s = 60.0
"""
    )
    return spec


def train(spec: Path, run: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-m", "tandem"] if launcher else TANDEM
    return subprocess.run(
        [*command, "train", str(spec), "--run-dir", str(run), *options],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def here(*words: object) -> None:
    """Run a command of `tandem` in this process, which has its imports done, on one thread as elsewhere."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    try:
        done = CliRunner().invoke(app, [*map(str, words)])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert done.exit_code == 0, done.output[-2000:]


def ranks(count: int) -> tuple[str, str]:
    return "--set", f"parallel.ranks={count}"
