"""Make models from scratch: Qwen3 architecture, small enough for a laptop."""

from __future__ import annotations

from typing import Any

from tandem.spec.presets import preset_config


def make_model(preset: str, tokenizer: Any, seed: int, attention: str = "sdpa") -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **preset_config(preset, len(tokenizer)),
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
