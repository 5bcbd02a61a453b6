"""Settings that are left out, chosen for described hardware: no GPU is needed."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tandem.build import sight, this_machine
from tandem.build.built_model import why_not_deterministic
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.recipes import run
from tandem.spec.hardware import Hardware, choices_text, choose
from tandem.spec.load import load_spec, parse_spec, to_toml
from tandem.spec.ranks import on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = Hardware("cpu")
H200 = Hardware("cuda", "NVIDIA H200", 139.8, vllm=True)
H100 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 79.2, vllm=True)
RTX_4090 = Hardware("cuda", "NVIDIA GeForce RTX 4090", 23.6, vllm=True)
T4 = Hardware("cuda", "Tesla T4", 14.6, bf16=False)


def rl(**tables: Any) -> Any:
    train = {"steps": 100, "lr": 1e-6, "groups_per_step": 32, "group_size": 16, **tables.pop("train", {})}
    model = {"path": "Qwen/Qwen3-1.7B", **tables.pop("model", {})}
    return parse_spec({"recipe": "rl", "model": model, "environment": {"name": "sort"}, "train": train, **tables})


def sft(**tables: Any) -> Any:
    train = {"steps": 100, "lr": 1e-5, **tables.pop("train", {})}
    model = {"path": "Qwen/Qwen3-1.7B", **tables.pop("model", {})}
    return parse_spec({"recipe": "sft", "model": model, "data": {"path": "rows.jsonl"}, "train": train, **tables})


def chosen(spec: Any, hardware: Hardware) -> dict[str, Any]:
    return {each.setting: each.chosen for each in choose(spec, hardware)[1]}


def test_grpo_on_an_h200_has_the_settings_of_the_tuned_row():
    """docs/PERFORMANCE.md, "A step of GRPO on one H200", and examples/vllm_gpu.toml."""
    spec, _ = choose(rl(), H200)
    tuned = load_spec(EXAMPLES / "vllm_gpu.toml")
    assert (spec.precision, spec.sync) == (tuned.precision, tuned.sync)
    assert (spec.model.attention, spec.model.compile, spec.model.activations) == ("packed", True, "selective")
    assert (spec.engine.kind, spec.engine.memory_share, spec.engine.max_running) == ("vllm", 0.3, 512)
    assert spec.train.micro_tokens == 16384


def test_a_model_that_sees_gets_a_bridge_that_it_supports_and_no_compiled_layers():
    spec, _ = choose(rl(), H200, sees=True)
    assert (spec.engine.kind, spec.sync.bridge, spec.model.compile) == ("vllm", "disk", False)
    sight.refuse_unsupported(spec, True)
    adapted, _ = choose(rl(model={"lora": {"rank": 8}}), H200, sees=True)
    assert adapted.sync.bridge == choose(rl(model={"lora": {"rank": 8}}), H200)[0].sync.bridge == "adapter_broadcast"
    asked, _ = choose(rl(sync={"bridge": "shared"}, engine={"kind": "vllm"}), H200, sees=True)
    with pytest.raises(SpecError, match="does not support a model that sees"):
        sight.refuse_unsupported(asked, True)


def test_sft_on_an_h200_has_the_settings_of_the_tuned_row():
    spec, _ = choose(sft(), H200)
    assert (spec.precision.weights, spec.precision.master) == ("bfloat16", "split")
    assert (spec.model.attention, spec.model.compile, spec.train.micro_tokens) == ("packed", True, 16384)


def test_a_gpu_gives_equal_bytes_only_if_the_spec_asks_for_them():
    gpu = torch.device("cuda")
    left_out, _ = choose(sft(), H200)
    asked, _ = choose(sft(deterministic=True), H200)
    assert why_not_deterministic(left_out, gpu) == "deterministic = false"
    assert why_not_deterministic(asked, gpu) == ""
    assert why_not_deterministic(rl(deterministic=True), gpu).startswith("on a GPU only SFT and preference training")
    assert why_not_deterministic(rl(), torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("tables", "hardware", "expected"),
    [
        ({"model": {"lora": {"rank": 16}}}, H100, {"sync.bridge": "adapter_broadcast"}),
        ({}, RTX_4090, {"model.activations": "recompute", "train.micro_tokens": 4096, "engine.memory_share": 0.45}),
        ({"train": {"steps": 5}}, H200, {"model.compile": False}),
        ({"train": {"max_lag": 1}}, H200, {"deterministic": False}),
        ({}, T4, {"precision.weights": "float32", "model.attention": "sdpa", "engine.kind": "hf"}),
        ({"model": {"lora": {"base": "nf4"}}}, H100, {"model.attention": "sdpa", "engine.kind": "hf"}),
        ({"strict": True}, H100, {"model.attention": "packed", "model.compile": True}),
        ({"engine": {"max_running": 64}}, H100, {"engine.kind": "vllm", "sync.bridge": "shared"}),
        ({"engine": {"kv_gib": 8.0}}, H100, {"engine.kind": "hf", "engine.max_running": 512}),
        ({"engine": {"kind": "vllm", "gpus": [1]}}, H100, {"sync.bridge": "broadcast"}),
        ({"engine": {"kind": "vllm"}, "train": {"gradient_release": True}}, H100, {"sync.bridge": "broadcast"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_else_a_spec_says_decides_too(tables: dict[str, Any], hardware: Hardware, expected: dict[str, Any]):
    found = chosen(rl(**tables), hardware)
    assert {setting: found[setting] for setting in expected} == expected


def test_short_answers_of_a_small_model_are_sampled_by_the_embedded_engine():
    """And by vLLM where answers are long, the model is large, or sampling and training overlap."""
    small = 134_515_008

    def engine_of(weights: int, **train: Any) -> str:
        return choose(rl(train={"max_tokens": 64, **train}), H200, weights=weights)[0].engine.kind

    assert engine_of(small) == "hf"
    assert {
        engine_of(0), engine_of(1_720_574_976), engine_of(small, max_tokens=65), engine_of(small, max_lag=1)
    } == {"vllm"}  # fmt: skip
    adapted = rl(model={"lora": {"rank": 8}}, train={"max_tokens": 64})
    assert choose(adapted, H200, weights=small)[0].engine.kind == "vllm"


def test_a_small_model_is_known_by_its_config(tmp_path: Path):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512, **shape}))
    spec = rl(model={"path": str(tmp_path)}, train={"max_tokens": 64})
    assert sight.choose(spec, H200)[0].engine.kind == "hf"
    assert sight.choose(spec, CPU)[0] == spec


def test_a_bridge_that_would_be_refused_is_not_chosen():
    assert rl(engine={"kind": "vllm"}, parallel={"ranks": 2}).sync.bridge == "broadcast"
    assert rl(engine={"kind": "vllm", "replicas": 2}).sync.bridge == "broadcast"
    assert rl(engine={"kind": "server"}, precision={"weights": "bfloat16", "master": "none"}).sync.bridge == "broadcast"
    with pytest.raises(SpecError, match=r"add sync\.bridge"):  # where it runs is unknown
        rl(engine={"kind": "vllm", "url": "http://10.0.0.1:1", "token_file": "t"})


def test_what_a_spec_says_wins():
    explicit = {
        "precision": {"weights": "float32"},
        "model": {"attention": "eager", "activations": "keep"},
        "train": {"micro_tokens": 512},
        "engine": {"kind": "hf", "max_running": 256},
    }
    spec = rl(**explicit)
    assert choose(spec, H200) == (spec, [])


def test_a_chosen_spec_leaves_nothing_to_choose():
    """A run keeps what it began with: on another machine its spec.toml is the same."""
    spec, choices = choose(rl(), H200)
    assert choices
    again = parse_spec(tomllib.loads(to_toml(spec)))
    assert again == spec
    assert choose(again, RTX_4090) == (spec, [])
    assert choose(again, CPU) == (spec, [])


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("example", ["quickstart", "sft", "preference", "rl_async"])
def test_models_from_scratch_stay_as_they_are_everywhere(example: str, hardware: Hardware):
    spec = load_spec(EXAMPLES / f"{example}.toml")
    assert choose(spec, hardware)[0] is spec


def test_on_a_cpu_nothing_changes_and_the_line_says_so():
    spec = rl()
    same, choices = choose(spec, CPU)
    assert same is spec
    assert choices_text(choices) == [
        "left out: precision.weights = 'float32', model.attention = 'sdpa', engine.kind = 'hf': for a CPU"
    ]


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
def test_a_setting_that_the_user_left_out_counts_as_left_out_after_a_value_is_chosen(hardware: Hardware):
    user = rl(strict=True, model={"attention": "packed", "lora": {"rank": 4}}, engine={"max_context": 512})
    whole = parse_spec(tomllib.loads(to_toml(choose(user, hardware)[0])))
    again = whole.only_asked(user.settings())
    assert again == whole
    settings = ["model.attention", "model.lora.rank", "engine.max_context", "strict"]
    assert not any(again.left_out(each) for each in settings)
    left_out = ["model.activations", "model.lora.alpha", "engine.max_running", "precision.weights", "deterministic"]
    assert all(again.left_out(each) and not whole.left_out(each) for each in left_out)


def test_a_line_has_the_setting_the_choice_and_the_reason():
    lines = choices_text(choose(rl(), H100)[1])
    assert "left out: sync.bridge = 'shared': one copy of the weights, in the engine's memory; nothing moves" in lines
    assert "left out: model.activations = 'selective', train.micro_tokens = 16384: 79 GiB of memory" in lines


def test_profiles_are_named_choices():
    here = Hardware("cuda", "NVIDIA H200", 139.8)
    assert chosen(rl(profile="24gb"), here)["train.micro_tokens"] == 4096
    assert chosen(rl(profile="80gb"), here)["train.micro_tokens"] == 16384
    laptop, _ = choose(rl(profile="laptop"), here)
    assert (laptop.device, laptop.precision.weights, laptop.engine.kind) == ("cpu", "float32", "hf")
    with pytest.raises(SpecError, match="profile = '24gb': is for a GPU, and there is none; leave it out"):
        choose(rl(profile="24gb"), CPU)


def test_paths_and_ranks_count_nothing_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    spec = sft().in_place()
    assert spec.data.path == str(tmp_path / "rows.jsonl")
    assert spec.left_out("precision.weights")
    assert on_ranks(spec, 2).left_out("precision.weights")
    assert parse_spec(spec.as_written()) == spec


def test_a_run_without_vllm_is_refused_before_it_has_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small = rl(model={"path": "x"}).as_written() | {"model": {"preset": "tiny"}, "engine": {"kind": "vllm"}}
    with pytest.raises(SpecError, match=r"engine\.kind = 'vllm': vLLM is not installed; run `tandem engine"):
        run(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    this_machine.refuse_no_vllm(sys.executable)


def test_a_plan_says_what_it_chose(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024,'
        '"tie_word_embeddings": true, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}'
    )
    (tmp_path / "spec.toml").write_text(to_toml_of(tmp_path))
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "spec.toml"), "--gpu", "h200", "--prompt-tokens", "32"])
    assert "left out: precision.weights = 'bfloat16': h200 computes in 16 bits" in told.stdout, told.output
    assert (
        "left out: precision.weights = 'float32'"
        in CliRunner()
        .invoke(app, ["plan", str(tmp_path / "spec.toml"), "--gpu", "cpu", "--prompt-tokens", "32"])
        .stdout
    )


def to_toml_of(model: Path) -> str:
    return (
        f'recipe = "rl"\nmodel = {{ path = "{model}" }}\nenvironment = {{ name = "sort" }}\n'
        "train = { steps = 100, lr = 1e-6, groups_per_step = 8, group_size = 8 }\n"
    )
