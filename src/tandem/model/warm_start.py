"""`model.warm_start`: begin with trained weights. The load is complete and changes the weights, or it is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.io.gguf.directory import model_directory
from tandem.io.model_path_check import refuse_no_model
from tandem.model.load_checkpoint import is_adapter, load_whole, refuse_faults
from tandem.model.lora import attach, on_tables, quiet_bitsandbytes
from tandem.model.quantized_base import quantized_parts
from tandem.spec.model import LoraSpec

_FIELD = "model.warm_start"

_SHAPELESS = (
    "model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "layer_norm_eps", "hidden_act",
    "rope_parameters", "sliding_window", "layer_types", "tie_word_embeddings",
)  # fmt: skip
"""Config fields that may differ between models of equal shapes, and make the weights of one useless in the other."""

_PLAIN_LORA = {
    "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    "modules_to_save": None, "lora_bias": False, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""The settings of Tandem's adapters; with other settings the same tensors mean something else."""


def is_adapter_start(source: str) -> bool:
    if (Path(source) / "status.json").exists():
        raise SpecError(f"{_FIELD} = '{source}': is a run; name its export/, or with model.lora its export/adapter/")
    refuse_no_model(source, field=_FIELD)
    return is_adapter(source, _FIELD)


def begin_with(module: Any, source: str) -> Any:
    """Return `module` with the weights of a full checkpoint, or with an adapter merged into its own weights."""
    return _merged(module, source) if is_adapter_start(source) else _full(module, model_directory(source, _FIELD))


def _full(module: Any, source: str) -> Any:
    from transformers import AutoConfig

    if quantized_parts(module):
        raise SpecError(
            f"{_FIELD} = '{source}': is a full checkpoint, which cannot be loaded over the quantised base of "
            "model.lora.base; set model.path to it, and leave warm_start out"
        )

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"{_FIELD} = '{source}': is neither a checkpoint nor an adapter: {error}") from error
    ours, theirs = module.config.get_text_config(), config.get_text_config()
    for key in _SHAPELESS:
        if (mine := getattr(ours, key, None)) != (other := getattr(theirs, key, None)):
            raise SpecError(
                f"{_FIELD} = '{source}': its {key} is {other}, this model's {mine}: its weights would not work "
                "here; set model.path to it, and leave warm_start out"
            )
    warm = load_whole(type(module), source, _FIELD, nothing_left=True, config=copy.deepcopy(module.config))
    was, now = dict(module.named_parameters()), dict(warm.named_parameters())
    refuse_faults(
        {"missing from it": was.keys() - now.keys(), "in it and unknown to the model": now.keys() - was.keys()},
        f"{_FIELD} = '{source}': is no checkpoint of this {type(module).__name__}",
    )
    if all(torch.equal(was[name], now[name]) for name in was):
        raise SpecError(
            f"{_FIELD} = '{source}': all its {len(was)} weights equal the model's own; "
            "leave it out, or name a checkpoint that was trained"
        )
    return warm


def _merged(module: Any, source: str) -> Any:
    config, saved = _read_adapter(module, source)
    config.base_model_name_or_path = None  # peft warns of every name; `_fill` refuses an adapter of another model
    try:
        adapter = attach(module, config)
    except ValueError as error:
        raise SpecError(f"{_FIELD} = '{source}': its adapter does not fit this model: {error}") from error
    _fill(adapter, saved, source)
    return adapter.merge_and_unload(safe_merge=True).requires_grad_(True)  # peft has frozen them


def begin_adapter(adapter: Any, spec: LoraSpec, source: str) -> None:
    """Load a saved adapter's weights into a new adapter, to continue its training."""
    config, saved = _read_adapter(adapter, source)
    for field, ours, theirs in (("rank", spec.rank, config.r), ("alpha", spec.alpha, float(config.lora_alpha))):
        if ours != theirs:
            raise SpecError(
                f"model.lora.{field} = {ours:g}: the adapter of {_FIELD} = '{source}' has {theirs:g}; "
                f"set model.lora.{field} = {theirs:g}, or leave [model.lora] out to merge the adapter"
            )
    ours, theirs = _targets(_held(adapter)), _targets(saved)
    if ours != theirs:
        raise SpecError(
            f"model.lora.targets: they are {', '.join(ours)}; in the adapter of {_FIELD} = '{source}' they are "
            f"{', '.join(theirs) or 'none'}; set model.lora.targets = {json.dumps(theirs)}"
        )
    for field, plain in _PLAIN_LORA.items():
        if (theirs := getattr(config, field, plain)) != plain:
            raise SpecError(
                f"{_FIELD} = '{source}': its adapter has {field} = {theirs}, which cannot be trained; "
                "leave [model.lora] out to merge it"
            )
    _fill(adapter, saved, source)


def _read_adapter(module: Any, source: str) -> tuple[Any, dict[str, Tensor]]:
    quiet_bitsandbytes()
    from peft import PeftConfig
    from peft.utils import load_peft_weights
    from safetensors import SafetensorError

    try:
        config, saved = PeftConfig.from_pretrained(source), load_peft_weights(source, device="cpu")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise SpecError(f"{_FIELD} = '{source}': its adapter cannot be read: {error}") from error
    if config.peft_type != "LORA":
        raise SpecError(f"{_FIELD} = '{source}': is a {config.peft_type} adapter; only LoRA is supported")
    if tables := on_tables(module, _targets(saved)):
        raise SpecError(
            f"{_FIELD} = '{source}': its adapter is also on {', '.join(tables)}, but only linear layers other than "
            "the head are supported; merge it where it was trained, and use the full checkpoint"
        )
    return config, saved


def _fill(adapter: Any, saved: dict[str, Tensor], source: str) -> None:
    """Load the saved tensors. Refuse missing or unknown tensors, and an adapter that changes nothing."""
    from peft import set_peft_model_state_dict

    ours = _held(adapter)
    wrong_shape = [name for name in ours.keys() & saved.keys() if ours[name].shape != saved[name].shape]
    faults = {
        "missing from it": ours.keys() - saved.keys(),
        "in it and unknown to the model": saved.keys() - ours.keys(),
        "of another shape in it": wrong_shape,
    }
    refuse_faults(faults, f"{_FIELD} = '{source}': is no adapter of this model")
    set_peft_model_state_dict(adapter, saved)
    ours = _held(adapter)
    lost = [name for name in saved if not torch.equal(ours[name].cpu(), saved[name].to(ours[name].dtype))]
    refuse_faults({"not taken over by peft": lost}, f"{_FIELD} = '{source}': does not load")
    if not any(bool(delta.any()) for delta in _deltas(adapter)):
        raise SpecError(
            f"{_FIELD} = '{source}': its adapter changes nothing: B·A is zero in every one of its layers; leave it "
            "out, or name one that was trained"
        )


def _held(adapter: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(adapter, save_embedding_layers=False)


def _targets(names: Iterable[str]) -> list[str]:
    """Return the module names: q_proj, v_proj, ... of `...q_proj.lora_A.weight`."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name})


def _deltas(adapter: Any) -> Iterator[Tensor]:
    """Yield the scaled B·A of each layer; none if peft made no layer."""
    from peft.tuners.lora import LoraLayer

    for part in adapter.modules():
        if isinstance(part, LoraLayer):
            layer: Any = part
            yield layer.get_delta_weight("default")
