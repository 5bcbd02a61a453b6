"""A frozen base in 8 or 4 bits on one GPU, beside the exact one: `python benchmarks/gpu/few_bits.py`.

Qwen3-1.7B's body with random weights and a vocabulary of bytes; rank 16 on every linear layer; bfloat16. The gap is
between the engine's logprobs and the trainer's of the same tokens; the error is of the logits, as a share of the spread
of those of the float32 model.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import note, table
from tandem.build import training
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.model import quantized_base
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

GPU = torch.device("cuda")
TOKENIZER = byte_tokenizer()


def save_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True, dtype="bfloat16",
        bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id,
    )  # fmt: skip
    with torch.device(GPU):
        module = Qwen3ForCausalLM(config)
    module.to(torch.bfloat16).save_pretrained(path)
    TOKENIZER.save_pretrained(path)


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(256, device=GPU)[None]).logits.float()


def step_ms(policy: Any, tokens: int = 8192) -> float:
    ids = torch.randint(0, 256, (8, tokens // 8), device=GPU)
    for timed in (False, False, True):
        torch.cuda.synchronize()
        started = time.perf_counter()
        policy.module(input_ids=ids).logits.float().logsumexp(-1).mean().backward()
        torch.cuda.synchronize()
        if timed:
            return 1000 * (time.perf_counter() - started)
    raise AssertionError


async def engine_gap(policy: Any, count: int = 64, length: int = 64) -> float:
    """Mean, in nats a token."""
    engine = EmbeddedEngine(
        policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode, max_context=1024
    )
    prompts = [list(range(index % 50 + 2)) for index in range(count)]
    asked = (engine.generate(p, Sampling(max_tokens=length, seed=i)) for i, p in enumerate(prompts))
    done = await asyncio.gather(*asked)
    await engine.close()
    gaps = []
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device=GPU)
        with torch.no_grad():
            scored = policy.module(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        said = scored.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        gaps.append((said - torch.tensor(completion.logprobs, device=GPU)).abs())
    return torch.cat(gaps).mean().item()


def main() -> None:
    note("a frozen base in few bits")
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "model", []
        save_model(path)
        plain = training.model(PathModel(path=str(path)), Float32Precision(), 0, GPU)
        exact = logits(plain.policy.module)
        del plain
        for base in ("exact", "int8", "nf4"):
            gc.collect()  # adapters and modules point at each other
            before = torch.cuda.memory_allocated()
            spec = PathModel(path=str(path), lora=LoraSpec(rank=16, base=base))
            policy = training.model(spec, Bfloat16Precision(), 0, GPU).policy
            held = (torch.cuda.memory_allocated() - before) / 1e9
            error = ((logits(policy.module) - exact).square().mean().sqrt() / exact.std()).item()
            gap = asyncio.run(engine_gap(policy))
            step = step_ms(policy)
            merged = quantized_base.merged(policy.module).to(GPU).eval() if base != "exact" else policy.module
            again = ((logits(merged) - logits(policy.module)).square().mean().sqrt() / exact.std()).item()
            few = f"{quantized_base.share(policy.module):.0%}"
            rows.append([base, few, f"{held:.2f}", f"{error:.4f}", f"{gap:.4f}", f"{again:.4f}", f"{step:.0f}"])
            del policy, merged
    heads = ["base", "in few bits", "GB", "error", "gap, nats", "export's error", "8k tokens, ms"]
    table(heads, rows)


if __name__ == "__main__":
    main()
