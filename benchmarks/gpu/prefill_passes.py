"""How many positions of a hybrid take as long as one more pass: `python benchmarks/gpu/prefill_passes.py`.

The embedded engine pads prompts of near lengths to one pass up to so many positions (engine/hf/passes.py). Random
weights in bfloat16, each pass computed by launches, the shortest of four. A pass of few positions is all launches; what
further positions take is the slope up to the largest pass. On a CPU: `--device cpu --sizes "128 x 6"`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from common import note, table
from hybrids import FAMILIES, hybrid_config
from tandem.build import built_model, standalone_engines
from tandem.spec.engine import HfEngineSpec
from tandem.spec.model import PathModel
from tandem.spec.precision import Bfloat16Precision
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Sampling

SIZES: dict[str, dict[str, int]] = {
    "128 x 6": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4},
    "1,024 x 12": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, "num_attention_heads": 8},
    "2,048 x 24": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16},
    "4,096 x 32": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16},
}
PASSES = ((2, 64), (8, 64), (32, 64), (8, 512), (32, 512))
Measured = dict[tuple[int, int], float]


async def measured(engine: Any, device: str) -> Measured:
    """Return the seconds of each pass, by its prompts and their length."""
    found = Measured()
    together = engine.passes._together

    def timed(wave: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        logits = together(wave)
        logits.cpu()
        place = len(wave), wave[0].length
        found[place] = min(found.get(place, 1e9), time.perf_counter() - began)
        return logits

    engine.passes._together = timed
    for prompts, length in PASSES:
        for _ in range(4):
            ids = [[(7 * number + 3 * place) % 200 for place in range(length)] for number in range(prompts)]
            await asyncio.gather(*(engine.generate(each, Sampling(1, seed=seed)) for seed, each in enumerate(ids)))
    await engine.close()
    return found


def row_of(name: str, size: str, device: Literal["cpu", "cuda"]) -> tuple[str, ...]:
    path = Path(tempfile.mkdtemp())
    try:
        torch.manual_seed(0)
        with torch.device(device):
            module: Any = AutoModelForCausalLM.from_config(hybrid_config(name, **SIZES[size]), dtype=torch.bfloat16)
        numbers = sum(each.numel() for each in module.parameters())
        module.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
        del module
        model = built_model.model(
            PathModel(path=str(path)), Bfloat16Precision(master="none"), 0, built_model.pick_device(device), 0
        )
        spec = HfEngineSpec(max_running=64, kv_gib=8.0, eager=True)
        found = asyncio.run(measured(standalone_engines.embedded(spec, model, inline=True), device))
    finally:
        shutil.rmtree(path)
    (few, least), *_, (many, most) = sorted((prompts * length, found[prompts, length]) for prompts, length in found)
    as_a_pass = least / (most - least) * (many - few)
    return (
        name, size, f"{numbers / 1e9:.2f}B", f"{least * 1e3:.1f} ms of {few}", f"{most * 1e3:.1f} ms of {many:,}",
        f"{as_a_pass:,.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", default=["Qwen3.5", "LFM2"], choices=list(FAMILIES))
    parser.add_argument("--sizes", nargs="*", default=[*SIZES][1:], choices=list(SIZES))
    asked = parser.parse_args()
    note(f"prefill_passes.py {' '.join(sys.argv[1:])}")
    rows = [row_of(name, size, asked.device) for name in asked.only for size in asked.sizes]
    table(("model", "hidden x layers", "parameters", "a small pass", "a large one", "as long as a pass"), rows)


if __name__ == "__main__":
    main()
