"""One job of real.py, in a process of its own: `python real_job.py ASKED.json`. It trains one task with one seed, by
Tandem or by TRL, then asks the model of every few steps the held-out questions, and writes what it found beside ASKED.

Both sides get the same model, questions, reward, groups, answers, tokens, steps, learning rate and moments' decay. Both
are on-policy, with Dr. GRPO's loss, no KL term and a linear schedule down to 0. What is asked between is no part of the
training: the weights of those steps are kept aside, as each side sampled with them: on a GPU in bfloat16, an adapter
beside them in float32. (TRL trains float32; rounded, that is what its vLLM had.) Afterwards plain transformers answers
greedily in float32, for both sides by the same lines.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from real_tables import share
from real_tasks import OF_THE_MACHINE, Asked, RealTask
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.types import Task

HERE = Path(__file__).parent


@dataclass
class Trained:
    """What a training left behind. `seconds` and `tokens`: after each step, from the first one's beginning."""

    start_s: float
    """From the process's beginning to that of the first step."""
    whole_s: float
    """From the process's beginning to the training's end, evaluations of the run itself included."""
    models: Callable[[], Iterator[tuple[int, Any]]]
    """Each kept step with its model, in float32."""
    seconds: list[float] = field(default_factory=list[float])
    tokens: list[float] = field(default_factory=list[float])
    rewards: list[float] = field(default_factory=list[float])
    more: dict[str, Any] = field(default_factory=dict[str, Any])


def loaded(path: str, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device).eval()


# --- Tandem


def spec_of(asked: Asked) -> dict[str, Any]:
    """A spec as a user of one GPU writes it: what it leaves out is chosen for the machine (docs/defaults.md)."""
    lora = asked.way == "lora"
    on_gpu = asked.device == "cuda"
    engine: dict[str, Any] = {"kind": asked.engine, "max_context": 512, "max_running": asked.groups * asked.size}
    if asked.engine == "vllm":
        engine |= {"memory_share": asked.share, "python": asked.vllm_python, "sleep": "keep"}
    return {
        "recipe": "rl", "name": asked.name, "seed": asked.seed, "device": asked.device, "deterministic": not on_gpu,
        "model": {"path": asked.model, **({"lora": {"rank": asked.rank}} if lora else {})},
        "environment": {"name": str(HERE / "real_tasks.py:RealTask"), "params": {"kind": asked.kind}},
        **({"engine": engine} if on_gpu else {}),
        "train": {
            "steps": asked.steps, "lr": asked.lora_lr if lora else asked.lr, "groups_per_step": asked.groups,
            "group_size": asked.size, "max_tokens": asked.tokens, "max_lag": asked.lag,
            "schedule": {"kind": "linear", "final": 0.0},
        },
        "eval": {"tasks": min(256, asked.questions)},
        "checkpoint": {"every": asked.every, "keep_every": asked.every, "keep_last": 1, "keep_best": False},
    }  # fmt: skip


class Clock:
    """A callback of the run: when each step ended."""

    def __init__(self, scratch: str) -> None:
        self.ended, self._stepped = list[float](), Path(scratch) / "stepped"

    def on_step(self, step: Any) -> None:
        self.ended.append(time.time())
        self._stepped.touch()


def train_tandem(asked: Asked) -> Trained:
    import tandem
    from tandem.runs.checkpoints import Checkpoints
    from tandem.spec.load import parse_spec, with_values

    clock, home = Clock(asked.scratch), Path(asked.scratch) / "run"
    run = tandem.run(with_values(parse_spec(spec_of(asked)), asked.settings), home, callbacks=[clock])
    whole_s = time.time() - asked.began
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step_s" in row]
    first = clock.ended[0] - rows[0]["time/step_s"]

    def models() -> Iterator[tuple[int, Any]]:
        for step in Checkpoints(home).versions():
            deploy = Checkpoints(home).path(step) / "deploy"
            if asked.way == "lora":
                from peft import PeftModel

                adapted: Any = PeftModel.from_pretrained(loaded(asked.model, asked.device), deploy)
                yield step, adapted.merge_and_unload()
            else:
                yield step, loaded(str(deploy), asked.device)

    return Trained(
        first - asked.began, whole_s, models, [each - first for each in clock.ended],
        running(row["tokens/sampled"] for row in rows), [row["reward/mean"] for row in rows],
        {"own_eval": run.status["eval"], "plan": planned(home, rows), "steps": medians(rows)},
    )  # fmt: skip


def running(numbers: Iterator[float]) -> list[float]:
    total, found = 0.0, list[float]()
    for each in numbers:
        total += each
        found.append(total)
    return found


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the steps after the first two, in which kernels are compiled."""
    later = rows[2:] or rows
    names = ("time/step_s", "time/generate_s", "time/train_s", "time/sync_s", "sync/logprob_gap")
    found = {name: sorted(row.get(name, 0.0) for row in later)[len(later) // 2] for name in names}
    return found | {"memory/peak": max(row["memory/peak"] for row in rows)}


def planned(home: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `tandem plan` says of this run's spec here: as it is asked; told how long answers are; and `full`: told how
    long those of the fullest micro-batch were, and how many tokens it had: groups that teach nothing are left out."""
    from tandem.recipes.plan_run import live_memory, plan_run
    from tandem.spec.load import load_spec

    at_start = json.loads((home / "plan.json").read_text()) if (home / "plan.json").exists() else {}
    spec: Any = load_spec(home / "spec.toml")
    answers = spec.train.groups_per_step * spec.train.group_size
    told = sum(row["tokens/sampled"] for row in rows) / len(rows) / answers
    kind, total_gib, _ = live_memory(spec)
    most = max(rows, key=lambda row: row["tokens/fullest_micro"])
    fullest = int(most["tokens/fullest_micro"])
    full: Any = spec.model_copy(update={"train": spec.train.model_copy(update={"micro_tokens": fullest})})
    knowing, filled = (
        plan_run(each, gpu=kind, memory_gib=total_gib, answer_tokens=of).as_json()
        for each, of in ((spec, told), (full, most["tokens/sampled"] / answers))
    )
    return {
        "answer_tokens": told, "fullest": fullest,
        **{name: {"trainer_gib": each["trainer_gib"], "step_s": each["step_s"], **each["times"]}
           for name, each in (("untold", at_start), ("told", knowing), ("full", filled)) if each},
    }  # fmt: skip


# --- TRL


def train_trl(asked: Asked) -> Trained:
    """As a competent user configures it for a small model on one GPU: weights in float32 under bf16 autocast (TRL's
    default), activations kept, large micro-batches, vLLM in its process and no pass for its importance correction."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    played = RealTask(asked.kind)
    rows = [{"prompt": list(each.messages), "question": each.payload["question"]} for each in played.tasks("train")]
    answers, on_gpu = asked.groups * asked.size, asked.device == "cuda"
    micro, served = min(asked.rows, answers), torch.bfloat16 if asked.trl_vllm and on_gpu else torch.float32

    def correct(completions: list[Any], question: list[str], **_: Any) -> list[float]:
        return [played.score(asked, said[0]["content"]) for asked, said in zip(question, completions, strict=True)]

    found = Trained(0.0, 0.0, lambda: iter(()))
    kept: dict[int, dict[str, torch.Tensor]] = {}

    class Watch(TrainerCallback):
        """Keeps times without what is not training: setting weights aside."""

        def __init__(self) -> None:
            self.began = self.aside = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.began:
                self.began = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.time()
            found.seconds.append(now - self.began - self.aside)
            (Path(asked.scratch) / "stepped").touch()
            print(f"step {state.global_step}: {found.seconds[-1]:.1f} s", flush=True)
            if state.global_step % asked.every == 0 or state.global_step == asked.steps:
                weights = model.state_dict().items()
                kept[state.global_step] = {name: each.detach().to("cpu", served, copy=True) for name, each in weights}
                self.aside += time.time() - now

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "completions/mean_length" in logs:
                found.tokens.append(logs["completions/mean_length"] * answers + (found.tokens or [0.0])[-1])
                found.rewards.append(logs["reward"])

    watch = Watch()
    config = GRPOConfig(
        output_dir=str(Path(asked.scratch) / "trl"), max_steps=asked.steps, seed=asked.seed,
        per_device_train_batch_size=micro, gradient_accumulation_steps=answers // micro, num_generations=asked.size,
        max_completion_length=asked.tokens, temperature=1.0, learning_rate=asked.lr, lr_scheduler_type="linear",
        adam_beta2=0.95, max_grad_norm=1.0, beta=0.0, loss_type="dr_grpo", scale_rewards="none", epsilon=0.2,
        epsilon_high=0.28, bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False, use_vllm=asked.trl_vllm,
        vllm_mode="colocate", vllm_gpu_memory_utilization=asked.share, vllm_max_model_length=512,
        vllm_importance_sampling_correction=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=asked.model, reward_funcs=correct, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(asked.model, padding_side="left"), callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    found.start_s, found.whole_s = watch.began - asked.began, time.time() - asked.began - watch.aside
    found.more = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0, "aside_s": watch.aside}

    def models() -> Iterator[tuple[int, Any]]:
        for step, weights in kept.items():
            model = loaded(asked.model, asked.device)
            model.load_state_dict(weights)
            yield step, model

    found.models = models
    return found


# --- the questions, for both


def answer_all(model: Any, tokenizer: Any, tasks: Sequence[Task], tokens: int, batch: int = 256) -> list[str]:
    """The greedy answers of plain transformers."""
    said: list[str] = []
    torch.set_float32_matmul_precision("highest")  # whatever a trainer set
    for begin in range(0, len(tasks), batch):
        chats = [list(task.messages) for task in tasks[begin : begin + batch]]
        asked = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            ids = model.generate(**asked, max_new_tokens=tokens, do_sample=False)
        said += tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def same_prompts(path: str, tokenizer: Any, tasks: Sequence[Task]) -> None:
    """Refuse where Tandem's prompts are not those that TRL makes with the tokenizer."""
    from tandem.build.standalone_engines import renderer
    from tandem.spec.model import PathModel

    ours = renderer(PathModel(path=path))
    for task in tasks:
        theirs = tokenizer.apply_chat_template(list(task.messages), add_generation_prompt=True, return_dict=True)
        if list(ours.prompt(task.messages)) != theirs["input_ids"]:
            raise SystemExit(f"{task.id}: prompts differ: {ours.prompt(task.messages)} and {theirs['input_ids']}")


def measure(asked: Asked) -> dict[str, Any]:
    played = RealTask(asked.kind)
    tasks = played.tasks("eval")  # short questions come first, for they are repeated most
    tasks = random.Random(0).sample(tasks, min(asked.questions, len(tasks)))
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    same_prompts(asked.model, tokenizer, tasks[:32])
    done = train_trl(asked) if asked.way == "trl" else train_tandem(asked)
    if len(done.seconds) != asked.steps or len(done.tokens) != asked.steps or not math.isfinite(sum(done.tokens)):
        raise SystemExit(f"{asked.name}: {len(done.seconds)} steps and {len(done.tokens)} counts, not {asked.steps}")
    began = time.time()

    def right(model: Any) -> str:
        said = answer_all(model, tokenizer, tasks, asked.tokens)
        scores = [played.score(task.payload["question"], text) for task, text in zip(tasks, said, strict=True)]
        examples[:] = [f"{task.payload['question']} -> {text}" for task, text in zip(tasks[:3], said, strict=False)]
        return "".join(str(int(each)) for each in scores)

    examples: list[str] = []
    curve = [{"step": 0, "seconds": 0.0, "tokens": 0.0, "right": right(loaded(asked.model, asked.device))}]
    for step, model in done.models():
        at = {"step": step, "seconds": done.seconds[step - 1], "tokens": done.tokens[step - 1]}
        curve.append({**at, "right": right(model)})
        print(f"held out after {step} steps: {share(curve[-1]['right']):.1%}", flush=True)
    return {
        "name": asked.name, "kind": asked.kind, "way": asked.way, "seed": asked.seed, "curve": curve,
        "train_s": done.seconds[-1], "start_s": done.start_s, "whole_s": done.whole_s, "asking_s": time.time() - began,
        "tokens": done.tokens[-1], "rewards": [round(each, 4) for each in done.rewards], "examples": examples,
        "seconds": [round(each, 2) for each in done.seconds],
        **done.more, "gpu": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "asked": {name: value for name, value in asdict(asked).items() if name not in OF_THE_MACHINE},
    }  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1])
    row = measure(Asked(**json.loads(path.read_text())))
    path.with_name("found.json.part").write_text(json.dumps(row))
    path.with_name("found.json.part").rename(path.with_name("found.json"))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may keep a process that has nothing left to do


if __name__ == "__main__":
    main()
