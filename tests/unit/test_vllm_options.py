"""What vLLM is started with, by the model's configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.build.run_engines import engine_command
from tandem.build.standalone_engines import vllm_options
from tandem.engine.vllm.options import VllmOptions
from tandem.errors import EngineError, SpecError
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.load import parse_engine


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
    [
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["mamba", "attention"]},
        {"mamba_d_state": 16},
        {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    ],
)
def test_states_of_layers_are_not_kept_by_parts_of_prompts_on_a_cpu(tmp_path: Path, config: dict[str, Any]):
    assert "--no-enable-prefix-caching" in arguments(tmp_path, **config)
    assert "--no-enable-prefix-caching" not in arguments(tmp_path, layer_types=["full_attention"])


def test_torch_rotates_the_queries_of_lfm2_on_a_cpu(tmp_path: Path):
    given = arguments(tmp_path, model_type="lfm2")
    assert json.loads(value(given, "--compilation-config")) == {"custom_ops": ["all", "-rotary_embedding"]}
    assert "--compilation-config" not in arguments(tmp_path, model_type="qwen3")
    assert "--compilation-config" not in arguments(tmp_path, model_type="lfm2", eager=False)


def with_further(place: Path, *further: str, device: str = "cuda", **options: Any) -> list[str]:
    (place / "config.json").write_text(json.dumps({"model_type": "cohere2", "sliding_window": 64}))
    made = VllmOptions(str(place), "python", device=device, further=further, **options)
    return made.arguments(place / "socket", "0.32.0")


def test_a_user_s_own_arguments_come_after_tandem_s(tmp_path: Path):
    given = with_further(tmp_path, "--max-num-batched-tokens", "16384", "--seed-of-mine=-1")
    assert given[-3:] == ["--max-num-batched-tokens", "16384", "--seed-of-mine=-1"]


@pytest.mark.parametrize(
    ("further", "said"),
    [
        (["--max-num-seqs", "8"], "--max-num-seqs is set by Tandem, here as `--max-num-seqs 257`"),
        (["--gpu_memory_utilization=0.5"], "--gpu-memory-utilization is set by Tandem"),
        (["--enable-uvicorn-access-log", "--no-enforce-eager"], "--enforce-eager is set by Tandem, here as `--enforce"),
        (["--hf-overrides.rope_theta", "1"], "--hf-overrides is set by Tandem, here as `--hf-overrides {"),
        (["-tp", "2"], "write the long name of '-tp', which begins with --"),
    ],
)
def test_an_argument_that_tandem_sets_is_refused_however_it_is_written(tmp_path: Path, further: list[str], said: str):
    with pytest.raises(EngineError, match=re.escape(said)):
        with_further(tmp_path, *further, eager=True)


def test_a_run_s_engine_table_and_its_command_line_carry_them():
    spec = parse_engine("vllm", ['arguments=["--kv-cache-memory-bytes", "1048576"]'])
    assert isinstance(spec, VllmEngineSpec)
    options = vllm_options(spec, device="cpu", dtype="float32", adapter_slots=0, max_rank=16)
    assert options.further == ("--kv-cache-memory-bytes", "1048576")
    words = engine_command(
        spec, device="cpu", dtype="float32", thinking=False, directory=Path("home"), readable=()
    )("model", 0, Path("ready"))  # fmt: skip
    assert 'arguments=["--kv-cache-memory-bytes", "1048576"]' in words
    with pytest.raises(SpecError, match="arguments"):
        parse_engine("server", ['arguments=["--x"]'])
