"""Planned against measured memory and seconds: `python benchmarks/gpu/plan.py [--only 0.6b,sft] [--out DIR]`.

Random weights of the real shapes; SFT and GRPO, all weights and LoRA. Each case is a run as a user starts one, in a
process of its own, which is ended when it has shown enough steps. What the plan cannot know it is told: the tokens of
an answer on average, and of a prompt. "Trainer" is what that process allocates (`memory/peak`), "card" what all
processes have of the GPU, looked at ten times a second. A row is written to DIR/plan_gpu_results.json as it comes.
`--shapes tiny,small --device cpu` is the same on this machine's CPU, with the presets and the embedded engine.
`--shapes moe,hybrid`, on either: families whose layers no formula describes, with the embedded engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import note, table
from tandem.build import built_model, standalone_engines
from tandem.io.child_process import Child
from tandem.io.jsonl import salvage_jsonl
from tandem.recipes.plan_run import plan_run
from tandem.recipes.random_checkpoints import SHAPES, random_checkpoint
from tandem.runs.planner.calibration import machine, ram_gib
from tandem.spec.load import parse_spec, to_toml
from tandem.spec.model import PresetModel
from tandem.spec.precision import Float32Precision

ROOT = Path("/tmp/plan-cases")
VOWELS = Path(__file__).with_name("vowels.py")
STEPS, FIRST = 5, 2  # that are waited for, and how many of those are not counted: kernels are compiled in them
CASE_S = 240.0
CASES: dict[str, dict[str, Any]] = {
    # tokens a micro-batch, sequences a step, most tokens of one; `mixed`: lengths between none and the most
    "0.6b sft full": {"activations": "keep", "micro": 16384, "sequences": 16, "length": 1024},
    "0.6b sft lora": {"activations": "keep", "micro": 16384, "sequences": 16, "length": 1024},
    "0.6b grpo full": {"activations": "keep", "micro": 16384, "groups": 16, "answer": 512},
    "0.6b grpo lora": {"activations": "keep", "micro": 16384, "groups": 16, "answer": 512},
    "1.7b sft full": {"activations": "selective", "micro": 8192, "sequences": 32, "length": 2048, "mixed": True},
    "1.7b sft lora": {"activations": "keep", "micro": 8192, "sequences": 32, "length": 2048, "mixed": True},
    "1.7b grpo full": {"activations": "selective", "micro": 8192, "groups": 16, "answer": 512},
    "1.7b grpo lora": {"activations": "keep", "micro": 8192, "groups": 16, "answer": 512},
    "8b sft full": {"activations": "recompute", "micro": 8192, "sequences": 8, "length": 1024, "release": True},
    "8b sft lora": {"activations": "selective", "micro": 4096, "sequences": 8, "length": 1024},
    "8b grpo full": {"activations": "recompute", "micro": 8192, "groups": 4, "answer": 256},
    "8b grpo lora": {"activations": "recompute", "micro": 8192, "groups": 4, "answer": 256},
    "smollm2-135m sft full": {"activations": "keep", "micro": 16384, "sequences": 64, "length": 256, "mixed": True},
    "smollm2-135m sft lora": {"activations": "keep", "micro": 16384, "sequences": 64, "length": 256, "mixed": True},
    "smollm2-135m grpo full": {"activations": "keep", "micro": 16384, "groups": 64, "answer": 64},
    "smollm2-135m grpo lora": {"activations": "keep", "micro": 16384, "groups": 64, "answer": 64},
    "tiny sft full": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "tiny sft lora": {"activations": "recompute", "micro": 512, "sequences": 4, "length": 256, "mixed": True},
    "tiny grpo full": {"activations": "keep", "micro": 1024, "groups": 2, "answer": 64},
    "tiny grpo lora": {"activations": "keep", "micro": 1024, "groups": 2, "answer": 64},
    "small sft full": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "small grpo lora": {"activations": "keep", "micro": 1024, "groups": 2, "answer": 64},
    "moe sft full": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "moe sft lora": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "hybrid sft full": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "hybrid sft lora": {"activations": "keep", "micro": 1024, "sequences": 4, "length": 256},
    "moe grpo full": {"activations": "keep", "micro": 1024, "groups": 2, "answer": 64},
    "hybrid grpo full": {"activations": "keep", "micro": 1024, "groups": 2, "answer": 64},
}
_COMMON = {
    "vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
COUNTED: dict[str, dict[str, Any]] = {
    "moe": {**_COMMON, "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 8, "head_dim": 64,
            "intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    "hybrid": {**_COMMON, "model_type": "qwen3_5_text", "hidden_size": 768, "num_hidden_layers": 8, "head_dim": 96,
               "intermediate_size": 2304, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
               "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}  # fmt: skip
_PER_STEP, _ON_GPU = ("micro", "sequences", "groups"), 8
"""On a GPU a step of theirs has so many times as much."""


def spec_of(name: str, case: dict[str, Any], device: str, python: str, home: Path) -> Any:
    shape, recipe, kind = name.split()
    on_gpu = device == "cuda"
    of_path = on_gpu or shape in COUNTED
    model: dict[str, Any] = {"path": str(checkpoint_of(shape))} if of_path else {"preset": shape}
    model["activations"] = case["activations"]
    if shape in COUNTED and on_gpu:
        model |= {"attention": "packed", "compile": False}
    if kind == "lora":
        model["lora"] = {"rank": 16}
    train: dict[str, Any] = {"steps": 1000, "lr": 1e-6, "micro_tokens": case["micro"], "max_idle_steps": 1000}
    if shape == "8b" and kind == "full":  # AdamW's state of all of it is 65 GB
        train |= {"optimizer": {"kind": "apollo_mini"}, "gradient_release": case.get("release", False)}
    whole: dict[str, Any] = {
        "name": "plan", "device": device, "deterministic": False, "model": model, "checkpoint": {"every": 0},
        **({"precision": {"weights": "bfloat16"}} if on_gpu else {}),
    }  # fmt: skip
    if recipe == "sft":
        data = {"kind": "file", "path": str(home / "rows.jsonl"), "eval_share": 0.0, "max_tokens": case["length"]}
        return parse_spec({**whole, "recipe": "sft", "data": data, "train": {**train, "batch_size": case["sequences"]}})
    train |= {"groups_per_step": case["groups"], "group_size": 8, "max_tokens": case["answer"], "max_lag": 0}
    whole |= {"recipe": "rl", "environment": {"name": str(VOWELS)}, "eval": {"tasks": 2, "max_tokens": 8}}
    if on_gpu and shape in COUNTED:
        whole |= {"engine": {"kind": "hf", "max_context": 1024}, "sync": {"bridge": "inproc"}}
    elif on_gpu:
        whole["engine"] = {"kind": "vllm", "python": python, "max_context": 1024, "memory_share": 0.35}
        whole["sync"] = {"bridge": "shared" if kind == "full" else "adapter_broadcast", "deadline_s": 120.0}
    return parse_spec({**whole, "train": train})


def checkpoint_of(shape: str) -> Path:
    return Path("/tmp") / full_name(shape)


def full_name(shape: str) -> str:
    return shape if shape in SHAPES or shape in COUNTED else f"qwen3-{shape}"


def make_checkpoint(shape: str, device: str) -> None:
    if shape not in COUNTED:
        random_checkpoint(full_name(shape), checkpoint_of(shape), device=device)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = built_model.tokenizer_from_scratch(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**COUNTED[shape], **ends), dtype=torch.bfloat16)
    module.save_pretrained(checkpoint_of(shape))
    tokenizer.save_pretrained(checkpoint_of(shape))


def write_rows(path: Path, case: dict[str, Any], overhead: int) -> None:
    """A letter is a token. Equally long ones, or of all lengths: half of the most on average."""
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(case["sequences"] * 40):
        tokens = rng.randrange(overhead + 2, case["length"] + 1) if case.get("mixed") else case["length"]
        letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens - overhead - 1))
        rows.append({"prompt": "?", "completion": letters})
    path.write_text("\n".join(json.dumps(row) for row in rows))


def told(name: str, case: dict[str, Any], rows: list[dict[str, Any]], renderer: Any) -> dict[str, float]:
    """What the plan is told of an environment; rows of data it reads."""
    if "sft" in name:
        return {}
    sys.path.insert(0, str(VOWELS.parent))
    from vowels import Vowels

    prompt = max(len(renderer.prompt(task.messages)) for task in Vowels().tasks("eval"))
    sampled = statistics.fmean(row["tokens/sampled"] for row in rows)
    return {"prompt_tokens": prompt, "answer_tokens": sampled / (case["groups"] * 8)}


class Card:
    """GiB that everybody has of the GPU, at most; used with `with`. On a CPU nothing."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.peak_gib, self.total_gib = 0.0, 0.0
        query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", "-lms", "100"]
        self._watch = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if on_gpu else None

    def __enter__(self) -> Card:
        if self._watch is not None:
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.terminate()
            self._watch.wait()

    def _read(self) -> None:
        lines: Any = self._watch and self._watch.stdout
        for line in lines or ():
            used, self.total_gib = (float(word) / 1024 for word in line.split(","))
            self.peak_gib = max(self.peak_gib, used)


def steps_of(home: Path) -> list[dict[str, Any]]:
    path = home / "run" / "metrics.jsonl"
    return list(salvage_jsonl(path).rows.values()) if path.exists() else []


def measure(name: str, case: dict[str, Any], device: str, python: str, out: Path) -> dict[str, Any]:
    home = ROOT / name.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    renderer = built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, "cpu").renderer
    if "sft" in name:
        empty, _ = renderer.conversation([{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}])
        write_rows(home / "rows.jsonl", case, len(empty))
    spec = spec_of(name, case, device, python, home)
    (home / "spec.toml").write_text(to_toml(spec))
    command = [sys.executable, "-m", "tandem", "train", str(home / "spec.toml"), "--run-dir", str(home / "run")]
    started = time.monotonic()
    with Card(on_gpu=device == "cuda") as card:
        child = Child(command, ready_file=home / "ready.json", log=home / "output.txt")
        try:
            while len(rows := steps_of(home)) < STEPS and child.exit_code is None:
                if time.monotonic() - started > CASE_S:
                    break
                time.sleep(0.2)
        finally:
            child.stop(grace_s=15.0)
    if len(rows) < STEPS:
        for log in [home / "output.txt", *home.rglob("log.txt"), *home.rglob("vllm.log")]:
            if log.exists():
                shutil.copyfile(log, out / f"{home.name}-{log.name}")
        return {"case": name, "error": f"{len(rows)} steps in {CASE_S:g} s; {child.exit_report()[-1500:]}"}
    rows, took = rows[:STEPS], time.monotonic() - started
    known = told(name, case, rows[FIRST:], renderer)
    kind, total = ("h200", card.total_gib) if device == "cuda" else ("cpu", ram_gib()[0])
    plan = plan_run(spec, gpu=kind, memory_gib=total, **known)  # pyright: ignore[reportArgumentType]
    measured = {key: statistics.median(row[key] for row in rows[FIRST:]) for key in rows[-1] if key.startswith("time/")}
    measured |= {"trainer_gib": max(row["memory/peak"] for row in rows), "card_gib": card.peak_gib}
    planned = {"trainer_gib": plan.trainer_gib, "card_gib": plan.peak_gib, **plan.as_json()["times"]}
    return {
        "case": name, "seconds": took, "told": known, "planned": planned | {"step_s": plan.times.step_s},
        "measured": measured, "rows": rows, "spec": spec.model_dump(mode="json"),
        "plan": plan.as_json(),
    }  # fmt: skip


def off(planned: float, measured: float) -> str:
    return f"{planned:.3g} / {measured:.3g} {planned / measured - 1:+.0%}" if measured else ""


def line(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["case"], "FAILED", "", "", "", "", "", "")
    planned, measured = row["planned"], row["measured"]
    pairs = [("trainer_gib", "trainer_gib"), ("card_gib", "card_gib"), ("step_s", "time/step_s")]
    pairs += [("rollout_s", "time/generate_s"), ("train_s", "time/train_s"), ("sync_s", "time/sync_s")]
    found = [off(planned[mine], measured.get(theirs, 0.0)) if planned[mine] else "" for mine, theirs in pairs]
    return (row["case"], *found, f"{row['seconds']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="0.6b,1.7b,8b")
    parser.add_argument("--only", default="", help="words that a case's name must have, with commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--python", default=standalone_engines.default_python(), help="vLLM's interpreter")
    parser.add_argument("--budget-s", type=float, default=560.0, help="no case begins after so many seconds")
    parser.add_argument("--make", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:  # in a process of its own: what it has of the GPU is gone with it
        make_checkpoint(arguments.make, arguments.device)
        return
    started, wanted = time.monotonic(), [word for word in arguments.only.split(",") if word]
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for name, case in CASES.items():
        shape = name.split()[0]
        if shape not in arguments.shapes.split(",") or not all(word in name for word in wanted):
            continue
        if time.monotonic() - started > arguments.budget_s:
            print(f"{name}: left out, {arguments.budget_s:g} s are over", flush=True)
            continue
        if shape in COUNTED and arguments.device == "cuda":
            case = {key: value * (_ON_GPU if key in _PER_STEP else 1) for key, value in case.items()}
        if (shape in COUNTED or arguments.device == "cuda") and not checkpoint_of(shape).exists():
            subprocess.run([sys.executable, __file__, "--make", shape, "--device", arguments.device], check=True)
        found.append(measure(name, case, arguments.device, arguments.python, arguments.out))
        print(" | ".join(line(found[-1])), found[-1].get("error", ""), flush=True)
        (arguments.out / "plan_gpu_results.json").write_text(json.dumps(found, indent=1))
    note(f"planned / measured; {machine('h200' if arguments.device == 'cuda' else 'cpu').source}")
    head = ("case", "trainer GiB", "card GiB", "step s", "rollouts s", "training s", "sync s", "took s")
    table(head, [line(row) for row in found])
    raise SystemExit(any("error" in row for row in found))


if __name__ == "__main__":
    main()
