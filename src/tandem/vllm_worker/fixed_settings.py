"""Refuse a model with settings by which vLLM and a trainer would compute differently.

One of them has a fixed value where the other reads config.json. No weight shows it, so a version with the right bytes
would be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tandem.errors import SyncError


class _Needed(NamedTuple):
    value: Any
    default: Any
    """What an absent setting means."""


def check_settings(model: Any) -> None:
    """Raise SyncError, with its name, for a setting with another value than the one that both compute with."""
    kind = type(model).__name__
    needed = _NEEDED[kind](model.config) if kind in _NEEDED else {}
    for name, (value, default) in needed.items():
        if name.startswith(_ROTARY):
            told = (getattr(model.config, "rope_parameters", None) or {}).get(name.removeprefix(_ROTARY))
        else:
            told = getattr(model.config, name, default)
        if told != value:
            raise SyncError(
                f"layout: {name} = {told} in the model's config.json; trainer and vLLM compute the same model with "
                f"{value} alone ({kind}); set engine.kind = 'server' for this one"
            )


_ROTARY = "rope_parameters."


def _gpt_oss(config: Any) -> Mapping[str, _Needed]:
    kinds = [("sliding_attention", "full_attention")[number % 2] for number in range(config.num_hidden_layers)]
    return {
        "swiglu_alpha": _Needed(1.702, 1.702),
        "swiglu_limit": _Needed(7.0, 7.0),
        "rms_norm_eps": _Needed(1e-5, 1e-5),
        "layer_types": _Needed(kinds, kinds),
    }


def _deepseek_v3(config: Any) -> Mapping[str, _Needed]:
    return {
        "scoring_func": _Needed("sigmoid", "softmax"),  # a trainer always computes with it
        "rms_norm_eps": _Needed(1e-6, 1e-6),  # of a trainer's norms within attention
        "rope_interleave": _Needed(True, True),
        f"{_ROTARY}attention_factor": _Needed(None, None),  # with it vLLM scales attention otherwise
    }


_NEEDED: Mapping[str, Callable[[Any], Mapping[str, _Needed]]] = {
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
"""By class of vLLM."""
