"""Atropos environments teach a model through the gateway, and every version that is trained on is the engine's.

    python benchmarks/atropos_learns.py [--lags 0,1,3] [--seeds 0,1,2] [--steps 30]

Each run is `tandem atropos` with examples/atropos_env.py in atroposlib's own environment (`make .tandem/atropos`). The
engine's process writes down what it samples, the trainer's what it takes: the two are compared token by token, and the
gateway and the rollout service between them have no say in it. Exit code 1 if a figure is missed; fifteen minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import note, table

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".tandem" / "atropos" / "bin" / "python"
ENVIRONMENT = HERE.parent / "examples" / "atropos_env.py"
LR, MAX_GAP, MIN_RISE = 6e-4, 1e-4, 1.5
"""Nats that trainer and engine may differ by about a token of one version; and how many times its beginning the reward
must be at the end."""

SPEC = """
recipe = "rl"
name = "vowels"
device = "cpu"
seed = {seed}
model.path = "{model}"
engine = {{ kind = "server", max_context = 96 }}
sync.bridge = "broadcast"
[rollouts]
kind = "atropos"
environments = ["{python} {environment} serve"]
[train]
steps = {steps}
groups_per_step = 4
group_size = 8
max_tokens = 24
max_lag = {lag}
lr = {lr}
"""


# --- in the processes that are watched


def logged(role: str, log: str, arguments: Sequence[str]) -> None:
    """`tandem` with what the engine samples, or what the trainer takes, written to a file."""
    from tandem.cli.main import app

    out = Path(log).open("a", buffering=1)  # noqa: SIM115 - for as long as the process lives

    def write(*row: Any) -> None:
        out.write(json.dumps(row) + "\n")

    if role == "engine":
        from tandem.engine.hf.engine import EmbeddedEngine

        generate = EmbeddedEngine.generate

        async def generating(self: Any, prompt_ids: Sequence[int], sampling: Any, **options: Any) -> Any:
            prompt = list(prompt_ids)
            completion = await generate(self, prompt_ids, sampling, **options)
            write(prompt, completion.ids, completion.logprobs, completion.versions)
            return completion

        EmbeddedEngine.generate = generating  # pyright: ignore[reportAttributeAccessIssue]
    else:
        from tandem.rollout.remote.trainer_store import RemoteStore

        take = RemoteStore.take

        async def taking(self: Any, count: int) -> Any:
            groups = await take(self, count)
            for each in (trajectory for group in groups for trajectory in group):
                write(each.ids, each.trained, each.logprobs, each.versions)
            return groups

        RemoteStore.take = taking
    sys.argv = ["tandem", *arguments]
    app()


# --- one run


def play(directory: Path, lag: int, seed: int, steps: int) -> dict[str, Any]:
    from tandem.model.presets import make_model
    from tandem.recipes import atropos_run
    from tandem.spec.load import load_spec
    from tandem.text.tokenizer import byte_tokenizer

    directory.mkdir(parents=True)
    tokenizer, model = byte_tokenizer(), directory / "model"
    make_model("tiny", tokenizer, seed=seed).save_pretrained(model)
    tokenizer.save_pretrained(model)
    spec = directory / "spec.toml"
    spec.write_text(
        SPEC.format(seed=seed, model=model, python=PYTHON, environment=ENVIRONMENT, steps=steps, lag=lag, lr=LR)
    )
    commands = {"engine": atropos_run.engine_command, "trainer": atropos_run.trainer_command}
    for role, command in commands.items():

        def watched(plan: Any, role: str = role, command: Any = command) -> list[str]:
            program, _, _, *rest = command(plan)
            return [program, str(Path(__file__).resolve()), "--as", role, str(directory / f"{role}.jsonl"), *rest]

        setattr(atropos_run, f"{role}_command", watched)
    error = ""
    try:
        atropos_run.run_atropos(load_spec(spec), directory / "run", tell=lambda text: None)
    except Exception as failed:  # noqa: BLE001 - a run that fails is a row of the table
        error = f"{type(failed).__name__}: {failed}"
    finally:
        for role, command in commands.items():
            setattr(atropos_run, f"{role}_command", command)
    return measured(directory, error)


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured(directory: Path, error: str) -> dict[str, Any]:
    steps = rows(directory / "run" / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in steps]
    few = max(1, len(rewards) // 5)
    gaps = [row["sync/logprob_gap"] for row in steps if "sync/logprob_gap" in row]
    return {
        "error": error,
        "steps": len(steps),
        "first": statistics.fmean(rewards[:few]) if rewards else 0.0,
        "last": statistics.fmean(rewards[-few:]) if rewards else 0.0,
        "gaps": len(gaps),
        "gap": max(gaps, default=0.0),
        "lag": max((row.get("lag/max", 0.0) for row in steps), default=0.0),
        **compared(rows(directory / "engine.jsonl"), rows(directory / "trainer.jsonl")),
    }


def compared(sampled: list[Any], taken: list[Any]) -> dict[str, int]:
    """Trained tokens, those of the engine's version, of an unknown one, and of another."""
    by_prompt: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for prompt, *answer in sampled:
        by_prompt[tuple(prompt)].append(answer)
    counts = {"tokens": 0, "right": 0, "unknown": 0, "wrong": 0}
    for ids, trained, logprobs, versions in taken:
        start = trained.index(True)
        theirs = {
            tuple(made)
            for its_ids, its_logprobs, made in by_prompt[tuple(ids[:start])]
            if its_ids == ids[start:]
            and all(abs(a - b) < 1e-6 for a, b in zip(its_logprobs, logprobs[start:], strict=True))
        }
        counts["tokens"] += sum(trained)
        for place, version in enumerate(versions[start:]):
            found = {made[place] for made in theirs}
            counts["unknown" if version == -2 else "right" if found == {version} else "wrong"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lags", default="0,1,3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    note(f"Atropos BaseEnv, gateway, our trainer: {asked.steps} steps of 4 x 8, lr {LR:g}, tiny, CPU")
    cells: list[list[str]] = []
    missed = False
    with tempfile.TemporaryDirectory() as home:
        for lag in map(int, asked.lags.split(",")):
            for seed in map(int, asked.seeds.split(",")):
                found = play(Path(home) / f"lag-{lag}-seed-{seed}", lag, seed, asked.steps)
                good = (
                    not found["error"] and found["steps"] == asked.steps and found["last"] > MIN_RISE * found["first"]
                    and found["gap"] < MAX_GAP and found["lag"] <= lag and found["right"] == found["tokens"] > 0
                )  # fmt: skip
                missed |= not good
                cells.append(
                    [
                        str(lag), str(seed), f"{found['steps']}", f"{found['first']:.3f} -> {found['last']:.3f}",
                        f"{found['gap']:.1e} ({found['gaps']})", f"{found['lag']:.0f}",
                        f"{found['right']:,} of {found['tokens']:,}", f"{found['unknown']}",
                        "met" if good else "MISSED",
                    ]
                )  # fmt: skip
                print(" ".join(cells[-1]), found["error"], flush=True)
    print()
    head = ["max_lag", "seed", "steps", "reward", "largest gap (steps)", "lag", "versions right", "unknown", ""]
    table(head, cells)
    return int(missed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        logged(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
