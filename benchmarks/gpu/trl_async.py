"""A peer's asynchronous GRPO on two GPUs, of steps.py's shape: `python benchmarks/gpu/trl_async.py --shape qwen3-1.7b`.

TRL's AsyncGRPOTrainer on the first GPU, and `vllm serve` as its documentation starts it on the second: 32 prompts of 8
answers of 512 tokens a step, all weights in bf16. What its trainer logs of each step; medians without the first two.
`--tuned`, as a competent user of these GPUs does: activations are kept, and a micro-batch has 32 answers, not 8.
`--stale` is what `max_lag` is here. Beside `steps.py broadcast:0 broadcast:1 broadcast:2 --gpu 1`.

TRL fetches its attention kernel (flash attention 3) from the hub. Where there is none, torch's own flash attention
takes its place, which for answers of 512 tokens is a few hundredths of a step. As for trl_step.py, TRL's own packages
must come before vLLM's on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from standing import ask_for_checkpoint, checkpoint_of, taken
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

OUT = Path(os.environ.get("OUT", "."))
WARM = 2


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self.rows.append(logs or {})
        print({name: value for name, value in (logs or {}).items() if name.startswith("perf/")}, flush=True)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum(each in "aeiou" for each in text) / max(len(text), 1) for text in texts]


def attention_of_torch() -> None:
    """Stand in for the hub: `kernels.get_kernel` returns torch's own flash attention."""

    def varlen(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest_q: Any, longest_k: Any, **more: Any
    ) -> Any:
        flash = torch.ops.aten._flash_attention_forward
        options = (0.0, True, False)  # dropout, causal, debug
        longest = int(longest_q), int(longest_k)
        spanned, keys = int(starts_q[-1]), int(starts_k[-1])  # what is beyond, the kernel leaves as the memory was
        sides = q[:spanned], k[:keys], v[:keys]
        found = flash(*sides, starts_q, starts_k, *longest, *options, scale=more["softmax_scale"])[0]
        return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, len(q) - spanned))

    module: Any = types.ModuleType("kernels")
    module.get_kernel = lambda *_, **__: types.SimpleNamespace(flash_attn_varlen_func=varlen)
    sys.modules["kernels"] = module


def served(checkpoint: Path, asked: argparse.Namespace, port: int) -> subprocess.Popen[bytes]:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    command = [
        asked.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--port", str(port),
        "--host", "127.0.0.1", "--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode",
        "processed_logprobs", "--max-model-len", str(asked.tokens + 512), "--gpu-memory-utilization", "0.85",
        "--max-num-seqs", str(8 * asked.groups), "--dtype", "bfloat16",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpus[1]}
    with (OUT / "vllm.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask_for_checkpoint(parser)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--stale", type=int, default=2, help="how many versions old a trained answer may be")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--hub", action="store_true", help="TRL's own attention kernel, from the hub")
    parser.add_argument("--python", default=sys.executable, help="that has vLLM")
    asked = parser.parse_args()
    checkpoint = checkpoint_of(asked)
    if not asked.hub:
        attention_of_torch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    micro = 32 if asked.tuned else 8
    config = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=asked.steps, num_generations=8, max_completion_length=asked.tokens,
        per_device_train_batch_size=micro, gradient_accumulation_steps=8 * asked.groups // micro, token_budget=0,
        gradient_checkpointing=not asked.tuned, learning_rate=1e-6, dtype="bfloat16", max_staleness=asked.stale,
        vllm_server_base_url=f"http://127.0.0.1:{port}", vllm_server_timeout=300.0, report_to="none",
        save_strategy="no",
    )  # fmt: skip
    count = asked.groups * (asked.steps + asked.stale + 2)
    prompts = [{"prompt": [{"role": "user", "content": f"Say number {number} in words."}]} for number in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    # TRL reads answers by templates that it knows.
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    rows, server = Rows(), served(checkpoint, asked, port)
    try:
        with taken() as memory:
            trainer = AsyncGRPOTrainer(
                model=str(checkpoint), reward_funcs=vowels, args=config, train_dataset=Dataset.from_list(prompts),
                processing_class=tokenizer, callbacks=[rows],
            )  # fmt: skip
            trainer.train()
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with the engine's own process
    steps = [row["perf/step_s"] for row in rows.rows if "perf/step_s" in row][WARM:]
    (OUT / "trl-async.json").write_text(json.dumps({"asked": vars(asked), "rows": rows.rows}, indent=1, default=str))
    between = f"{min(steps):.2f} to {max(steps):.2f}"
    tokens = statistics.median(row.get("batch/trained_tokens_per_step", 0.0) for row in rows.rows[WARM:])
    print(
        f"{checkpoint.name}{', tuned' * asked.tuned}, staleness {asked.stale}: {statistics.median(steps):.2f} s a step "
        f"({between}), {tokens:,.0f} trained tokens, {memory.peak_gib:.1f} GiB"
    )


if __name__ == "__main__":
    main()
