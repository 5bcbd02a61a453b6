"""Which models can be in a GGUF file: their config, and the names and values of their tensors in transformers.

llama.cpp stores some values in another way than transformers: it interleaves the rotary halves of Llama's queries and
keys, and adds 1 to Gemma's norms. `store` does that, and `restore` undoes it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tandem.io.gguf.header import Gguf

Array = Any
"""A numpy array."""

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FREQUENCIES = "rope_freqs.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class _Family(NamedTuple):
    """`config`: what differs from `_common`, by the file. `block`: names within a layer, beside `_BLOCK`."""

    model_type: str
    architecture: str
    config: Callable[[Gguf], dict[str, Any]]
    block: dict[str, str] = {}  # noqa: RUF012 - a named tuple's default is never changed
    interleaved: bool = False
    norm_plus_one: bool = False


def config_of(file: Gguf) -> dict[str, Any]:
    """Return the config for transformers. ValueError with the reason if the model cannot be read."""
    family = _family(file)
    try:
        config = {**_common(file), **family.config(file)}
    except KeyError as error:
        raise ValueError(f"its metadata lacks {error.args[0]}") from error
    names = set(file.tensors)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
        **config,
    }


def names_of(file: Gguf) -> dict[str, str]:
    """Return transformers' name of each tensor. ValueError for a tensor that is not known."""
    family = _family(file)
    block = {**_BLOCK, **family.block}
    found: dict[str, str] = {}
    for name in file.tensors:
        if name == FREQUENCIES and family.interleaved:
            continue  # the config has them, as its rope_parameters
        stem, _, leaf = name.rpartition(".")
        parts = stem.split(".")
        if stem in _ENDS:
            found[name] = f"{_ENDS[stem]}.{leaf}"
        elif len(parts) == 3 and parts[0] == "blk" and parts[2] in block:
            found[name] = f"model.layers.{parts[1]}.{block[parts[2]]}.{leaf}"
        else:
            raise ValueError(f"its tensor {name} is not known in a model of '{file.architecture}'")
    return found


def stored_names(architecture: str, names: Iterable[str]) -> dict[str, str]:
    """Return the name in a GGUF file of each tensor of transformers. ValueError for a tensor that has none."""
    block = {there: here for here, there in {**_BLOCK, **_FAMILIES[architecture].block}.items()}
    ends = {there: here for here, there in _ENDS.items()}
    found: dict[str, str] = {}
    for name in names:
        stem, _, leaf = name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        here = ends.get(stem) if layer is None else block.get(layer[2])
        if here is None:
            raise ValueError(f"a GGUF file of a '{architecture}' model has no name for its tensor {name}")
        found[name] = f"{here}.{leaf}" if layer is None else f"blk.{layer[1]}.{here}.{leaf}"
    return found


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a model's architecture. ValueError for one that is not known here."""
    kind = str(config.get("model_type"))
    found = next((name for name, family in _FAMILIES.items() if kind == family.model_type), "")
    if kind == "mistral" and not config.get("sliding_window"):
        found = "llama"
    if not found:
        known = ", ".join(family.model_type for family in _FAMILIES.values())
        raise ValueError(
            f"its model_type is '{kind}'; those that are written as GGUF files are {known}, and mistral without a "
            "sliding window"
        )
    return found


def is_changed(file: Gguf, name: str) -> bool:
    """Return whether llama.cpp stored the tensor in another way than transformers."""
    family = _family(file)
    return (family.interleaved and _halves(file, name) > 0) or (family.norm_plus_one and "norm" in name)


def restore(file: Gguf, name: str, values: Array) -> Array:
    """Return a tensor's values as transformers has them. A norm must be given in float32."""
    if _family(file).norm_plus_one and "norm" in name:
        return values - 1
    if heads := _halves(file, name):
        shape = values.shape
        return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return values


def store(file: Gguf, name: str, values: Array) -> Array:
    """Return a tensor's values as llama.cpp has them: the inverse of `restore`."""
    if _family(file).norm_plus_one and "norm" in name:
        return values + 1
    if _family(file).interleaved and (heads := _halves(file, name)):
        shape = values.shape
        return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return values


def _halves(file: Gguf, name: str) -> int:
    """Return the heads of a tensor whose rotary halves are interleaved; 0 for all other tensors."""
    if ".attn_q." in name:
        return int(file.of("attention.head_count"))
    if ".attn_k." in name:
        return int(file.of("attention.head_count_kv", file.of("attention.head_count")))
    return 0


def _family(file: Gguf) -> _Family:
    if file.architecture not in _FAMILIES:
        raise ValueError(
            f"its architecture is '{file.architecture}'; those that are read from GGUF files are {', '.join(_FAMILIES)}"
        )
    if int(file.of("expert_count", 0)):
        raise ValueError(f"it is a mixture of {file.of('expert_count')} experts, which is not read from GGUF files")
    return _FAMILIES[file.architecture]


def _common(file: Gguf) -> dict[str, Any]:
    heads, hidden = int(file.of("attention.head_count")), int(file.of("embedding_length"))
    config: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(file.of("feed_forward_length")),
        "num_hidden_layers": int(file.of("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.of("attention.head_count_kv", heads)),
        "head_dim": int(file.of("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(file.of("context_length")),
        "rms_norm_eps": _shortest(file.of("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, 10000.0),
    }
    for part, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (number := file.fields.get(f"tokenizer.ggml.{part}_token_id")) is not None:
            config[f"{key}_token_id"] = int(number)
    return config


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32: 1e-05 of 9.999999747378752e-06."""
    (exact,) = struct.unpack("<f", struct.pack("<f", value))
    digits = (float(f"{exact:.{count}g}") for count in range(1, 10))
    return next((short for short in digits if struct.pack("<f", short) == struct.pack("<f", exact)), exact)


def _rope(file: Gguf, base: float) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _shortest(file.of("rope.freq_base", base))}
    kind = str(file.of("rope.scaling.type", "none"))
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _shortest(file.of("rope.scaling.factor"))}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(file.of("rope.scaling.original_context_length"))
    elif kind != "none":
        raise ValueError(f"its rotary scaling is '{kind}', which is not read from GGUF files")
    return rope


def _plain(_file: Gguf) -> dict[str, Any]:
    return {}


def _llama(file: Gguf) -> dict[str, Any]:
    names = set(file.tensors)
    config: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
    }
    if FREQUENCIES in names:
        config["rope_parameters"] = _llama3_rope(file)
    return config


def _llama3_rope(file: Gguf) -> dict[str, Any]:
    """Return Llama 3's scaling. The file has only the resulting factors, so find the settings that give them."""
    stored = file.tensors[FREQUENCIES]
    if stored.kind != 0:
        raise ValueError(f"its {FREQUENCIES} are not float32")
    import numpy as np

    stored_factors = np.fromfile(file.path, "<f4", math.prod(stored.shape), offset=stored.offset)
    for factor in (8.0, 32.0, 4.0, 16.0):
        rope = {
            "rope_type": "llama3", "rope_theta": _shortest(file.of("rope.freq_base")), "factor": factor,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        if np.allclose(llama3_factors(rope, 2 * len(stored_factors)), stored_factors, rtol=1e-3):
            return rope
    raise ValueError(f"its {FREQUENCIES} are not those of Llama 3.1 to 3.3, and its config cannot be told from them")


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """Return by which Llama 3's scaling divides each rotary frequency."""
    import numpy as np

    wave = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wave - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _gemma2(file: Gguf) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": _shortest(file.of("attn_logit_softcapping")),
        "final_logit_softcapping": _shortest(file.of("final_logit_softcapping")),
        "sliding_window": int(file.of("attention.sliding_window")),
        "query_pre_attn_scalar": _query_scale(file, largest=46),
    }


def _gemma3(file: Gguf) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "sliding_window": int(file.of("attention.sliding_window")),
        "query_pre_attn_scalar": _query_scale(file, largest=62),
        "rope_parameters": {"sliding_attention": near, "full_attention": _rope(file, 1e6)},
    }


def _query_scale(file: Gguf, largest: int) -> int:
    """Return by which Gemma scales queries. The file lacks it; only the largest model has another than its head's."""
    if int(file.of("block_count")) == largest:
        return int(file.of("embedding_length")) // int(file.of("attention.head_count"))
    return int(file.of("attention.key_length"))


def _phi3(file: Gguf) -> dict[str, Any]:
    heads = int(file.of("attention.head_count"))
    head_dim = int(file.of("embedding_length")) // heads
    rope = _rope(file, 10000.0) | {"partial_rotary_factor": int(file.of("rope.dimension_count", head_dim)) / head_dim}
    window = int(file.of("attention.sliding_window", 0))
    return {
        "original_max_position_embeddings": int(file.of("context_length")), "rope_parameters": rope,
        "sliding_window": window or None,
    }  # fmt: skip


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _llama, interleaved=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _plain),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _plain, _QK_NORMS),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _gemma2, _GEMMA, norm_plus_one=True),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _GEMMA | _QK_NORMS, norm_plus_one=True),
    "phi3": _Family("phi3", "Phi3ForCausalLM", _phi3, _PHI),
}
"""By the name of llama.cpp. Mistral's models and SmolLM 1 and 2 are of 'llama' there."""
