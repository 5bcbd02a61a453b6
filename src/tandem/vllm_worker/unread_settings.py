"""Refuse a model whose configuration has settings that vLLM's class does not read, but a trainer computes with.

No weight shows them, so a version with the right bytes would be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.errors import SyncError


def check_settings(model: Any) -> None:
    """Raise SyncError, with its name, for a setting that vLLM's class has a fixed value for, if it is another."""
    kind = type(model).__name__
    fixed = _FIXED[kind](model.config) if kind in _FIXED else {}
    for name, value in fixed.items():
        if (told := getattr(model.config, name, value)) != value:
            raise SyncError(
                f"layout: {name} = {told} in the model's config.json, and vLLM's {kind} always computes with {value}"
            )


def _gpt_oss(config: Any) -> Mapping[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "layer_types": [kinds[number % 2] for number in range(config.num_hidden_layers)],
    }


_FIXED: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {"GptOssForCausalLM": _gpt_oss}
"""The values by class of vLLM."""
