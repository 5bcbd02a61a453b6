"""What a plan has to know of a model: its shape, from its config alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from tandem.errors import SpecError
from tandem.io.bounded_json import read_json
from tandem.io.gguf.families import config_of
from tandem.io.gguf.header import read_gguf
from tandem.io.gguf.source import gguf_of
from tandem.io.model_path_check import refuse_no_model
from tandem.ops.byte_sizes import Dims, ModelShape
from tandem.ops.counted_shape import CountedShape, Shape
from tandem.spec.algorithm import DistillSpec
from tandem.spec.model import SEEING, LoraSpec, ModelSpec, PresetModel
from tandem.spec.presets import preset_config
from tandem.spec.run import RunSpec


class NoPlan(SpecError):
    """What the model is made of is not known to the planner."""


BYTE_VOCABULARY = 266
"""Of the presets: 256 bytes and ten special tokens."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_QK_NORM = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True, f"{SEEING}_text": True}
"""Architectures whose layers are known here, and whether queries and keys have norms."""
_WINDOW = 4096
"""Transformers' own, where a config with a sliding window does not say how long it is."""


def read_run(spec: RunSpec, shaped: Callable[[Mapping[str, Any], str], Shape] | None = None) -> Shape:
    """Return the shape of a run's model, with the size of distillation's teacher, where it is there beside the policy.
    `shaped`: returns the shape for a config; left out, NoPlan for a model whose layers are not known here."""
    shaped = shaped or shape_of
    shape = read_shape(spec.model, shaped)
    algorithm = getattr(spec, "algorithm", None)
    if not isinstance(algorithm, DistillSpec) or algorithm.is_served:
        return shape
    teacher = shaped(read_config(algorithm.teacher, algorithm.teacher_revision), algorithm.teacher)
    return replace(shape, teacher=teacher.total)


def read_shape(spec: ModelSpec, shaped: Callable[[Mapping[str, Any], str], Shape] | None = None) -> Shape:
    if isinstance(spec, PresetModel):
        return shape_of({"model_type": "qwen3", **preset_config(spec.preset, BYTE_VOCABULARY)}, spec.preset)
    return (shaped or shape_of)(read_config(spec.path, spec.revision), spec.path)


def read_config(path: str, revision: str = "main") -> Mapping[str, Any]:
    """A directory's config.json, or a hub id's."""
    try:
        gguf = gguf_of(path)
    except ValueError as error:
        raise NoPlan(f"'{path}': {error}") from error
    if gguf is not None:
        refuse_no_model(path)
        return config_of(read_gguf(gguf))
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        refuse_no_model(path, revision)
        fetch: Any = getattr(import_module("huggingface_hub"), "hf_hub_download")  # noqa: B009 - partly unknown to pyright
        try:
            file = Path(fetch(path, "config.json", revision=revision))
        except Exception as error:
            raise NoPlan(f"'{path}': is no directory, and its config cannot be had: {type(error).__name__}") from error
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise NoPlan(f"{file}: cannot be read: {error}") from error


def kind_of(config: Mapping[str, Any]) -> str:
    return str((config.get("text_config") or config).get("model_type", "unknown"))


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether formulas describe the layers of a model with this config."""
    return kind_of(config) in _QK_NORM


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    whole, config = config, config.get("text_config") or config
    kind = kind_of(config)
    if kind not in _QK_NORM:
        raise NoPlan(
            f"'{name}': the layers of '{kind}' are not known to the planner, only those of {', '.join(_QK_NORM)}"
        )
    try:
        vision = whole["vision_config"] if whole.get("model_type") == SEEING else None
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        bias = bool(config.get("attention_bias", False))
        has_window = kind == "mistral" or config.get("use_sliding_window", False)
        return ModelShape(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            tied=bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            qk_norm=_QK_NORM[kind],
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            context=int(config.get("max_position_embeddings") or 0),
            tower=_tower(vision) if vision else 0,
            masks=has_window and config.get("sliding_window", _WINDOW) is not None,
            pixels=vision["patch_size"] * vision["spatial_merge_size"] if vision else 0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NoPlan(f"'{name}': its config lacks what a plan needs: {error}") from error


def _tower(vision: Mapping[str, Any]) -> int:
    """Return the number of parameters of a Qwen3-VL's vision tower."""
    width, wide, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * width * (width + 1) + wide * (2 * width + 1) + 5 * width
    merged, deep = width * vision["spatial_merge_size"] ** 2, len(vision["deepstack_visual_indexes"])
    mergers = (1 + deep) * (merged + out) * (merged + 1) + 2 * width + deep * 2 * merged
    return width * (patch + 1 + vision["num_position_embeddings"]) + vision["depth"] * block + mergers


def trained_tensors(shape: Shape, lora: LoraSpec | None) -> Sequence[tuple[Dims, bool]]:
    """Of every trained tensor its dimensions, and whether it is a matrix for a matrix's optimizer."""
    if isinstance(shape, CountedShape):
        return shape.trained(lora)
    if lora is not None:
        return [(dims, True) for dims in adapter_tensors(shape, lora)]
    layer = [(dims, True) for dims in shape.linears.values()] + [((size,), False) for size in shape.vectors()]
    return layer * shape.layers + [(dims, False) for dims in shape.tables] + [((shape.hidden,), False)]


def adapter_tensors(shape: ModelShape, lora: LoraSpec) -> list[Dims]:
    """Return A and B of each adapted linear layer. SpecError for a target that names none."""
    named = {
        f".layers.{layer}.{'self_attn' if name in _ATTENTION else 'mlp'}.{name}": dims
        for layer in range(shape.layers)
        for name, dims in shape.linears.items()
    }
    ends = (
        ("",) if lora.targets == "all-linear" else tuple(f".{target.removeprefix('model.')}" for target in lora.targets)
    )
    if unknown := [end[1:] for end in ends if not any(name.endswith(end) for name in named)]:
        raise SpecError(
            f"model.lora.targets = {list(lora.targets)}: {', '.join(unknown)}: no linear layer for adapters has that "
            f"name; take some of {', '.join(shape.linears)}, or 'all-linear'"
        )
    adapted = [dims for name, dims in named.items() if name.endswith(ends)]
    return [each for out, into in adapted for each in ((lora.rank, into), (out, lora.rank))]


def adapter_numbers(shape: Shape, lora: LoraSpec | None) -> int:
    return sum(prod(dims) for dims, _ in trained_tensors(shape, lora)) if lora else 0
