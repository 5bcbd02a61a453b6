"""Write checkpoints with a released model's shape and random weights, for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.build import built_model
from tandem.io import atomic_write

_IDS = {"qwen3": 151_669, "llama": 49_152}
"""Vocabulary sizes of the released models' tokenizers."""
_OWN_IDS = 266
"""Vocabulary size of the presets' tokenizer."""
_FILE_BYTES = 4e9
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "qwen3-1.7b": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "llama3-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_checkpoint(shape: str, path: Path, seed: int = 0, device: str = "cpu") -> None:
    """Write a checkpoint in bfloat16, with the presets' tokenizer and as many ids as the released model has.

    A large one is made faster on a GPU, with different random numbers. One tensor is in memory at a time, and one file.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM

    kind = SHAPES[shape]["model_type"]
    tokenizer = built_model.tokenizer_from_scratch(_IDS[kind] - _OWN_IDS)
    config: Any = AutoConfig.for_model(
        **SHAPES[shape],
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        module: Any = (Qwen3ForCausalLM if kind == "qwen3" else LlamaForCausalLM)(config)
    files: dict[str, str] = {}
    with atomic_write.directory(path, durable=False) as directory:

        def write(tensors: dict[str, torch.Tensor]) -> None:
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file(tensors, directory / file, {"format": "pt"})
            files.update(dict.fromkeys(tensors, file))
            tensors.clear()

        held: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():  # tied ones once
            values = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
            if parameter.ndim > 1:
                values.normal_(0.0, config.initializer_range, generator=generator)
            held[name] = values.cpu()
            if sum(each.nbytes for each in held.values()) > _FILE_BYTES:
                write(held)
        write(held)
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
