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
from tandem.errors import SpecError
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.load import parse_engine
from tandem.spec.vllm_arguments import OF_EVERY_RUN


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
    given = with_further(tmp_path, "--max-num-batched-tokens", "16384", "--no-enable-prefix-caching")
    assert given[-3:] == ["--max-num-batched-tokens", "16384", "--no-enable-prefix-caching"]


@pytest.mark.parametrize(
    ("further", "options", "said"),
    [
        (
            ["--hf-overrides.rope_theta", "1"],
            {},
            "--hf-overrides is set for this model, as `--hf-overrides {",
        ),
        (["--hf-overr.rope=1"], {}, "--hf-overrides is set for this model"),
        (["--enable-chunked-pref"], {"device": "cpu"}, "as `--no-enable-chunked-prefill`"),
        (["--additional-c.foo", "1"], {"adapter_slots": 2}, "--additional-config is set for this model"),
    ],
)
def test_what_this_model_needs_is_not_replaced(tmp_path: Path, further: list[str], options: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=re.escape(said)):
        with_further(tmp_path, *further, **options)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--max-num-seqs", "--max-num-seqs is set by Tandem: set engine.max_running"),
        ("--max-num-se=8", "--max-num-seqs is set by Tandem: set engine.max_running"),
        ("--gpu_memory_utilization=0.5", "--gpu-memory-utilization is set by Tandem: set engine.memory_share"),
        ("--device-memory-utilization", "--device-memory-utilization is set by Tandem: set engine.memory_share"),
        ("--no-enforce-eag", "--enforce-eager is set by Tandem: set engine.eager"),
        ("--no-enable-scale", "--enable-scale-out is set by Tandem"),
        ("--middleware", "--middleware is set by Tandem"),
        ("--config", "--config is set by Tandem"),
        ("--see", "--seed is set by Tandem"),
        ("other-model", "'other-model' is no argument"),
        ("-tp", "write the long name of '-tp'"),
    ],
)
def test_what_tandem_sets_for_every_model_is_refused_with_the_spec_however_it_is_written(argument: str, said: str):
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_engine("vllm", [f'arguments=["{argument}", "1"]'])


def test_every_argument_of_every_run_is_among_the_refused(tmp_path: Path):
    ours = VllmOptions(str(tmp_path), "python", sleeps=True, eager=True, max_context=9, adapter_slots=1)
    names = {each[2:] for each in ours.arguments(tmp_path / "socket", "0.32.0") if each.startswith("--")}
    assert names - OF_EVERY_RUN.keys() == {"additional-config"}


def test_a_run_s_engine_table_and_its_command_line_carry_them():
    spec = parse_engine("vllm", ['arguments=["--chat-template", "😀"]'])
    assert isinstance(spec, VllmEngineSpec)
    options = vllm_options(spec, device="cpu", dtype="float32", adapter_slots=0, max_rank=16)
    assert options.further == ("--chat-template", "😀")
    words = engine_command(
        spec, device="cpu", dtype="float32", thinking=False, directory=Path("home"), readable=()
    )("model", 0, Path("ready"))  # fmt: skip
    assert parse_engine("vllm", [word for word in words if word.startswith("arguments=")]) == spec
    for kind, given in (("server", []), ("vllm", ['url="http://127.0.0.1:1"'])):
        with pytest.raises(SpecError, match="arguments"):
            parse_engine(kind, ['arguments=["--x"]', *given])
