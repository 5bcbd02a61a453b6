"""What vLLM is started with, by the model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.vllm.options import VllmOptions


def arguments(place: Path, version: str = "0.32.0", **config: Any) -> list[str]:
    (place / "config.json").write_text(json.dumps(config))
    eager = config.pop("eager", True)
    return VllmOptions(str(place), "python", device="cpu", eager=eager).arguments(place / "socket", version)


def value(given: list[str], name: str) -> str:
    return given[given.index(name) + 1]


def test_layers_of_cohere_s_models_slide_over_as_many_tokens_as_the_trainer_s(tmp_path: Path):
    """vLLM 0.32 adds one to the window of the configuration, 0.26 does not, and transformers does not."""
    given = arguments(tmp_path, model_type="cohere2", sliding_window=4096)
    assert json.loads(value(given, "--hf-overrides")) == {"sliding_window": 4095}
    assert "--hf-overrides" not in arguments(tmp_path, "0.26.0", model_type="cohere2", sliding_window=4096)
    assert "--hf-overrides" not in arguments(tmp_path, model_type="mistral", sliding_window=4096)
    assert "--hf-overrides" not in arguments(tmp_path, model_type="cohere2", sliding_window=None)


@pytest.mark.parametrize(
    "config",
    [{"layer_types": ["conv", "full_attention"]}, {"layer_types": ["mamba", "attention"]}, {"mamba_d_state": 16}],
)
def test_states_of_layers_are_not_kept_by_parts_of_prompts_on_a_cpu(tmp_path: Path, config: dict[str, Any]):
    assert "--no-enable-prefix-caching" in arguments(tmp_path, **config)
    assert "--no-enable-prefix-caching" not in arguments(tmp_path, layer_types=["full_attention"])


def test_torch_rotates_the_queries_of_lfm2_on_a_cpu(tmp_path: Path):
    given = arguments(tmp_path, model_type="lfm2")
    assert json.loads(value(given, "--compilation-config")) == {"custom_ops": ["all", "-rotary_embedding"]}
    assert "--compilation-config" not in arguments(tmp_path, model_type="qwen3")
    assert "--compilation-config" not in arguments(tmp_path, model_type="lfm2", eager=False)
