"""The families of docs/families.md, each as one model of a tiny size with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import family_images
import torch
import transformers

from tandem.build import built_model
from tandem.build.built_model import BuiltModel
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Float32Precision, PrecisionSpec
from tandem.text.tokenizer import byte_tokenizer

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()

_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 256,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip


class Family(NamedTuple):
    models: str
    config: str
    """The name of the config's class in transformers."""
    sizes: dict[str, Any] = {}  # noqa: RUF012 - a named tuple's default is never changed
    attention: str = "sdpa"
    """The attention of plain transformers; "eager" where it has no other."""
    sees: bool = False


FAMILIES: dict[str, Family] = {
    "Llama": Family("Llama 2 to 3.3, SmolLM 1 and 2", "LlamaConfig"),
    "SmolLM3": Family("SmolLM3", "SmolLM3Config"),
    "Mistral": Family("Mistral, Ministral", "MistralConfig", {"sliding_window": 24}),
    "Qwen2": Family("Qwen 2 and 2.5", "Qwen2Config", {"hidden_size": 128}),
    "Qwen3": Family("Qwen 3", "Qwen3Config"),
    "Qwen3-MoE": Family("Qwen 3 MoE", "Qwen3MoeConfig", _EXPERTS),
    "Qwen3-Next": Family(
        "Qwen 3 Next", "Qwen3NextConfig", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}
    ),
    "Qwen3.5": Family("Qwen 3.5, text", "Qwen3_5TextConfig", _DELTA),
    "Qwen3.5-MoE": Family(
        "Qwen 3.5 MoE, text", "Qwen3_5MoeTextConfig", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}
    ),
    "Mixtral": Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma": Family("Gemma 1", "GemmaConfig"),
    "Gemma2": Family("Gemma 2", "Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 32}, "eager"),
    "Gemma3": Family(
        "Gemma 3, text",
        "Gemma3TextConfig",
        {
            "sliding_window": 24, "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "Phi3": Family("Phi 3 and 4", "Phi3Config"),
    "OLMo2": Family("OLMo 2", "Olmo2Config"),
    "OLMo3": Family("OLMo 3", "Olmo3Config", {"sliding_window": 24}),
    "Gemma4": Family(
        "Gemma 4, text",
        "Gemma4TextConfig",
        {
            "sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": len(TOKENIZER),
        },
    ),
    "GLM4": Family("GLM 4", "Glm4Config"),
    "Cohere2": Family("Command R7B", "Cohere2Config", {"sliding_window": 24}),
    # Published checkpoints name these widths once more, where vLLM reads them.
    "LFM2": Family(
        "LFM 2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "hidden_size": 128, "conv_dim": 128, "block_dim": 128},
    ),
    "Granite 4": Family(
        "Granite 4, hybrid",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16,
            "hidden_size": 128, "num_local_experts": 0, "shared_intermediate_size": 64,
        },
    ),
    "Jamba": Family(
        "Jamba",
        "JambaConfig",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "hidden_size": 128,
        },
    ),
    "Falcon-H1": Family(
        "Falcon H1",
        "FalconH1Config",
        {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    ),
    "OLMo hybrid": Family("OLMo hybrid", "OlmoHybridConfig"),
    "Llama 4": Family(
        "Llama 4, text",
        "Llama4TextConfig",
        {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 24},
    ),
    "Granite": Family("Granite 3", "GraniteConfig"),
    "gpt-oss": Family(
        "gpt-oss", "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}, "eager"
    ),
    "DeepSeek-V3": Family(
        "DeepSeek V3 and R1 (MLA)",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 512,
            "head_dim": 64, "qk_rope_head_dim": 64,  # vLLM's CPU build computes 512 and 64 alone, and YaRN's table
            "qk_nope_head_dim": 8, "v_head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
            },
        },
    ),
    "Qwen3-VL": Family("Qwen 3 VL, dense", "Qwen3VLConfig", {"head_dim": 16}, sees=True),  # as many as its axes fill
}  # fmt: skip


class Bench:
    """One family's model on the disk, and what is made of it."""

    def __init__(self, family: Family, place: Path) -> None:
        self.family, self.place = family, place
        self.path = place / "model"
        options = {**_SIZES, **family.sizes}
        options = family_images.seeing_sizes(options) if family.sees else options
        config = getattr(transformers, family.config)(**options)
        torch.manual_seed(0)
        module: Any = self._loader.from_config(config, attn_implementation=family.attention)
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                # Otherwise 1 or 0, so that a mistake hides.
                if "norm" in name or name.endswith((".bias", "sinks", "correction_bias")):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        module.save_pretrained(self.path)
        (family_images.TOKENIZER if family.sees else TOKENIZER).save_pretrained(self.path)
        if family.sees:
            family_images.write_processor(self.path)

    @property
    def _loader(self) -> Any:
        return transformers.AutoModelForImageTextToText if self.family.sees else transformers.AutoModelForCausalLM

    def built(
        self, lora: LoraSpec | None = None, path: Path | None = None, precision: PrecisionSpec | None = None
    ) -> BuiltModel:
        spec = PathModel(path=str(path or self.path), lora=lora)
        return built_model.model(spec, precision or Float32Precision(), 0, CPU, images=self.place / "images")

    def plain(self, path: Path | None = None) -> Any:
        """The model as transformers alone loads it."""
        return self._loader.from_pretrained(
            path or self.path, dtype=torch.float32, attn_implementation=self.family.attention
        ).eval()
