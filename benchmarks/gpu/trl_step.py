"""A peer's step of GRPO, of steps.py's shape on the same GPU: `python benchmarks/gpu/trl_step.py --shape qwen3-0.6b`.

TRL with vLLM in its process (`colocate`), all weights in bf16, 32 prompts of 8 answers of 512 tokens, no KL; what its
trainer logs of each step, without the first, and the most that was taken of the GPU. As TRL configures itself, or with
`--tuned` as a competent user of this GPU does: activations are kept instead of computed again, a micro-batch has 16
answers, and the pass that computes logprobs once more for its importance correction is off. TRL's own packages must
come before vLLM's on the path, for both bring a `dill`, and lie in a directory called `site-packages`, for dill goes by
that name. Two of these on one machine want a MASTER_PORT each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from standing import ask_for_checkpoint, checkpoint_of, taken
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s", flush=True)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(each in "aeiou" for each in text) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    ask_for_checkpoint(parser)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=0, help="answers a micro-batch; 0: 32, or 16 if tuned")
    parser.add_argument("--tuned", action="store_true", help="no recomputation, no importance correction")
    parser.add_argument("--share", type=float, default=0.25, help="of the GPU's memory, for vLLM")
    parser.add_argument("--liger", action="store_true")
    arguments = parser.parse_args()
    checkpoint = checkpoint_of(arguments)
    cuda, rows = arguments.device == "cuda", arguments.rows or (16 if arguments.tuned else 32)
    config = GRPOConfig(
        output_dir="/tmp/trl", max_steps=arguments.steps, per_device_train_batch_size=rows,
        gradient_accumulation_steps=8 * arguments.groups // rows, num_generations=8, beta=0.0,
        max_completion_length=arguments.tokens, temperature=1.0, learning_rate=1e-6, bf16=cuda, use_cpu=not cuda,
        use_vllm=cuda, vllm_mode="colocate", vllm_gpu_memory_utilization=arguments.share,
        use_liger_kernel=arguments.liger, gradient_checkpointing=not arguments.tuned,
        vllm_importance_sampling_correction=not arguments.tuned, report_to="none", save_strategy="no",
        logging_steps=1, model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
    )  # fmt: skip
    count = arguments.groups * arguments.steps
    prompts = Dataset.from_list([{"prompt": f"Say number {number} in words."} for number in range(count)])
    watch = Watch()
    with taken() as memory:
        trainer = GRPOTrainer(
            model=str(checkpoint), reward_funcs=vowels, args=config, train_dataset=prompts,
            processing_class=AutoTokenizer.from_pretrained(checkpoint), callbacks=[watch],
        )  # fmt: skip
        trainer.train()
    steps, peak_gib = watch.seconds[1:], memory.peak_gib
    row = {"shape": checkpoint.name, "seconds": watch.seconds, "gib": peak_gib, "log": trainer.state.log_history}
    name = f"trl-step{'-tuned' * arguments.tuned}.json"
    (Path(os.environ.get("OUT", ".")) / name).write_text(json.dumps(row, indent=1, default=str))
    middle, between = statistics.median(steps), f"{min(steps):.2f}-{max(steps):.2f}"
    what = f"{checkpoint.name}{', tuned' * arguments.tuned}"
    print(f"{what}: {middle:.2f} s a step ({between}), {peak_gib:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
