"""Load checkpoints completely or not at all: transformers would fill missing weights with random numbers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tandem.errors import SpecError
from tandem.io.gguf.directory import model_directory
from tandem.io.model_path_check import refuse_adapter, refuse_no_model
from tandem.ops.vision import sees

_log = logging.getLogger(__name__)


def load_model(path: str, revision: str, attention: str, field: str = "model.path") -> Any:
    """Load a model. `field`: the field of the spec that errors name."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = model_directory(path, field)
    config = refuse_unfit(path, revision, field)
    loader = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    attention = supported_attention(config, attention)
    return load_whole(loader, path, field, revision=revision, attn_implementation=attention)


def supported_attention(config: Any, wanted: str) -> str:
    """Return `wanted`, or "eager" for a model that transformers has no SDPA for: one with soft caps or sinks. A run
    reports it as an option that is not engaged."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if wanted != "sdpa" or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return wanted
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return wanted if model_class._supports_sdpa else "eager"


def load_whole(loader: Any, source: str, field: str, *, nothing_left: bool = False, **options: Any) -> Any:
    """Load a module whose every weight came from `source`; with `nothing_left`, it also uses every weight of `source`.

    transformers knows which names are tied and which may be missing.
    """
    from safetensors import SafetensorError

    options = {
        "dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True, "ignore_mismatched_sizes": True,
        **options,
    }  # fmt: skip
    try:
        module, report = loader.from_pretrained(source, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecError(f"{field} = '{source}': no causal language model can be loaded from it: {error}") from error
    if os.path.isdir(source):  # otherwise peft writes this machine's path into every adapter as its base
        module.name_or_path = module.config._name_or_path = ""
    refuse_incomplete(module, report, source, field, nothing_left=nothing_left)
    return module


def refuse_incomplete(module: Any, report: Any, source: str, field: str, *, nothing_left: bool = False) -> None:
    """Raise SpecError unless transformers' report says that every weight of the module came from `source`. Warn of
    tensors of `source` that are left out, and keep the text as `module.left_out`."""
    faults = {
        "missing from it": report["missing_keys"],
        "of another shape in it": [key for key, *_ in report["mismatched_keys"]],
        "in it and unknown to the model": report["unexpected_keys"] if nothing_left else (),
        "in it and unreadable": report["error_msgs"],
    }
    name, left = type(module).__name__, sorted(report["unexpected_keys"])
    refuse_faults(faults, f"{field} = '{source}': is no whole checkpoint of {name}")
    if left:
        module.left_out = f"{field} = '{source}': {name} leaves out {len(left)} of its tensors: {_shown(left)}"
        _log.warning("%s", module.left_out)


def refuse_other_images(config: Any, path: str, field: str) -> None:
    """Raise SpecError for a model that sees images in a way that is not supported, and cannot be loaded without."""
    from transformers.models.auto import modeling_auto as auto

    of_text, of_images = auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if sees(config) or type(config) in of_text or type(config) not in of_images:
        return
    raise SpecError(
        f"{field} = '{path}': {config.model_type} sees images in a way that is not supported; set {field} to a dense "
        "Qwen3-VL (Qwen/Qwen3-VL-2B-Instruct, -4B-, -8B-, -32B-), or to a model of text"
    )


def refuse_images(config: Any, path: str, field: str, way_out: str) -> None:
    """Raise SpecError for a model that sees, where that is not supported."""
    if sees(config):
        raise SpecError(f"{field} = '{path}': {config.model_type} sees images, which is not supported here; {way_out}")


def refuse_faults(faults: dict[str, Iterable[str]], what: str) -> None:
    """Raise SpecError, with the count and the first names of each kind, if there are any faults."""
    found = {kind: sorted(names) for kind, names in faults.items()}
    told = [f"{len(names)} {kind} ({_shown(names)})" for kind, names in found.items() if names]
    if told:
        raise SpecError(f"{what}: weights are {'; '.join(told)}")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def is_adapter(source: str, field: str) -> bool:
    from transformers.utils.peft_utils import find_adapter_config_file

    try:
        return find_adapter_config_file(source) is not None
    except (OSError, ValueError) as error:
        raise SpecError(f"{field} = '{source}': no such directory, and the hub does not answer: {error}") from error


def refuse_unfit(path: str, revision: str, field: str = "model.path", *, reward_model: bool = False) -> Any:
    """Return the model's config. Raise SpecError if transformers would not load exactly this model's weights.
    `reward_model`: whether it must have a score in the place of an lm-head."""
    from transformers import AutoConfig

    refuse_no_model(path, revision, field)
    if is_adapter(path, field):  # transformers would load the base model instead
        refuse_adapter(path, field)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"{field} = '{path}': no causal language model can be loaded from it: {error}") from error
    refuse_other_images(config, path, field)
    has_score = any(each.endswith("ForSequenceClassification") for each in config.architectures or ())
    if has_score is not reward_model:
        what = "has a score for a head (a reward model)" if has_score else "has no score for a head: no reward model"
        way_out = "it generates no text; name it as environment.judge.path" if has_score else "name a reward model"
        raise SpecError(f"{field} = '{path}': {what}; {way_out}")
    if getattr(config, "quantization_config", None):
        raise SpecError(
            f"{field} = '{path}': its weights are quantised; set {field} to the exact model (model.lora.base = 'int8' "
            "or 'nf4' quantises the base of adapters)"
        )
    return config
