"""Say of a model what a GGUF file says: the inverse of `config_of` in families.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's architecture, from its config in transformers. ValueError for a rotary scaling
    that a GGUF file cannot say."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = rope_of(config)
    said: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        **_scaling(rope),
    }
    if architecture == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            said[name] = float(config[name])
    if config.get("sliding_window") and architecture.startswith(("gemma", "phi")):
        said["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{name}": value for name, value in said.items()}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: those of the layers that attend to all tokens, where there are two kinds."""
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind in ("default", "llama3"):  # llama3: the factors are a tensor
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its rotary scaling is '{kind}', which is not written to GGUF files")
    said = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return said
