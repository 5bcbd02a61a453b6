"""A peer's SFT, of train.py's sequences on the same GPU: `python benchmarks/gpu/trl_sft.py padded packed --liger`.

TRL's trainer with all weights in bf16 and torch's own attention, no activations made again; sequences of 200 to 2,000
tokens, `padded` to the longest of a micro-batch or `packed` into rows of 4,096. Tokens as its trainer counts them,
medians of the steps without the first two. For its packages on the path see trl_step.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from standing import ask_for_checkpoint, checkpoint_of, taken
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_step import Watch

WARM, ROW = 2, 4096


def sequences(count: int, num_ids: int) -> Dataset:
    rng = random.Random(0)
    return Dataset.from_list(
        [{"input_ids": [rng.randrange(num_ids) for _ in range(rng.randint(200, 2000))]} for _ in range(count)]
    )


def measured(way: str, checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    cuda, packed = arguments.device == "cuda", way == "packed"
    rows, steps = arguments.rows // 4 if packed else arguments.rows, WARM + arguments.steps
    config = SFTConfig(
        output_dir="/tmp/trl-sft", max_steps=steps, per_device_train_batch_size=rows,
        gradient_accumulation_steps=arguments.accumulate, packing=packed, max_length=ROW, learning_rate=1e-5, bf16=cuda,
        use_cpu=not cuda, use_liger_kernel=arguments.liger, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1,
        model_init_kwargs={"dtype": "bfloat16" if cuda else "float32", "attn_implementation": "sdpa"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    # Four sequences make about one row of 4,096, as far as it fills.
    data = sequences(arguments.rows * arguments.accumulate * steps * 2, min(len(tokenizer), 151_000))
    watch = Watch()
    with taken() as memory:
        trainer = SFTTrainer(
            model=str(checkpoint), args=config, train_dataset=data, processing_class=tokenizer, callbacks=[watch]
        )
        trainer.train()
    counts = [row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row]
    tokens = [now - was for was, now in zip([0, *counts], counts, strict=False)]
    rates = [count / took for count, took in zip(tokens, watch.seconds, strict=False)][WARM:]
    return {
        "way": way, "shape": checkpoint.name, "rates": rates, "tokens": tokens, "seconds": watch.seconds,
        "gib": memory.peak_gib, "log": trainer.state.log_history,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=["padded", "packed"])
    ask_for_checkpoint(parser)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="sequences a micro-batch; packed, a quarter of it in rows")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--liger", action="store_true")
    arguments = parser.parse_args()
    checkpoint, found = checkpoint_of(arguments), list[dict[str, Any]]()
    for way in arguments.ways:
        try:
            row = measured(way, checkpoint, arguments)
        except torch.OutOfMemoryError as error:
            print(f"TRL {way}: {str(error)[:200]}", flush=True)
            continue
        middle = statistics.median(row["rates"])
        spread = f"{min(row['rates']):.0f}-{max(row['rates']):.0f}"
        print(f"TRL {way}: {checkpoint.name}: {middle:.0f} tokens/s ({spread}), {row['gib']:.1f} GiB", flush=True)
        found.append(row)
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
    Path(os.environ.get("OUT", "."), "trl-sft.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
