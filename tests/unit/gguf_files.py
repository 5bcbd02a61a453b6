"""Tiny GGUF files, written as llama.cpp's converter writes them; names and layouts do not come from Tandem's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = [3, 3, 3] + [1] * (len(TOKENS) - 3)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": len(TOKENS), "tie_word_embeddings": True,
}  # fmt: skip


def random_model(config: Any, seed: int = 0) -> Any:
    """A model of transformers with random weights, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def interleaved(weight: Any, heads: int) -> Any:
    """Rotary halves side by side, as llama.cpp has those of Llama."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write(path: Path, arch: str, model: Any, kind: str = "F32", fields: dict[str, Any] | None = None) -> Path:
    """Write a model. `kind`: of its matrices. `fields`: more metadata, or other values; None leaves a field out."""
    config, writer = model.config, gguf.GGUFWriter(str(path), arch)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    said: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers, f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size, f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": heads, f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim, f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(np.float32(config.rms_norm_eps)),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS, "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE, **(fields or {}),
    }  # fmt: skip
    for name, value in said.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{leaf}" if stem else f"{leaf}.weight"
        values = tensor.detach().numpy()
        if arch == "llama" and ".self_attn.q_proj" in name:
            values = interleaved(values, heads)
        if arch == "llama" and ".self_attn.k_proj" in name:
            values = interleaved(values, kv_heads)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        as_kind = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
