"""`tandem model check`: what it says of a sound model, and that what stands in the way is a finding."""

from __future__ import annotations

import json
import logging
import logging.handlers
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_tokenizers import CHATML
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import tandem
from tandem.build import built_model, standalone_engines, training
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.recipes import plan_run as plan_runs
from tandem.recipes.model_check import notes_of
from tandem.runs.first_spec import FirstAnswers, first_spec
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Float32Precision
from tandem.text.tokenizer import CHAT_TEMPLATE, byte_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    standalone_engines.write_preset("tiny", "0", str(path))
    return path


def checked(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["model", "check", *words, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_sound_model_is_described_and_answers_with_the_trainers_logprobs(tiny: Path):
    code, told = checked(str(tiny), "--gpu", "h200")
    assert (code, told["passed"], told["findings"], told["mended"]) == (0, True, [], [])
    assert told["model"]["family"] == "qwen3 (Qwen3ForCausalLM)"
    assert told["template"]["ends an answer"] == "<|end|>"
    assert told["fits"]["engine hf"] == "bridges inproc"
    assert told["fits"]["parallel.ranks"] == "yes"
    assert "(h200): fits" in told["memory"]["all weights"]
    assert told["answer"]["nats a token, engine from trainer"] < 1e-5
    assert "no findings" in CliRunner().invoke(app, ["model", "check", str(tiny)]).stdout


def test_what_transformers_warns_of_is_a_note_in_our_words_or_nothing(tiny: Path, tmp_path: Path):
    """transformers prints a table for a tensor that it does not know, and a line for `temperature` without sampling."""
    odd = tmp_path / "odd"
    shutil.copytree(tiny, odd)
    tensors = load_file(odd / "model.safetensors")
    save_file({**tensors, "odd.weight": torch.zeros(2)}, odd / "model.safetensors", {"format": "pt"})
    (odd / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false}')
    command = [sys.executable, "-m", "tandem", "model", "check", str(odd), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    left = f"model.path = '{odd}': Qwen3ForCausalLM leaves out 1 of its tensors: odd.weight"
    assert json.loads(done.stdout)["notes"] == [left]


def test_a_run_says_what_is_left_out_once_and_keeps_the_other_warnings_of_transformers(tiny: Path, tmp_path: Path):
    odd = tmp_path / "odd"
    shutil.copytree(tiny, odd)
    tensors = load_file(odd / "model.safetensors")
    save_file({**tensors, "odd.weight": torch.zeros(2)}, odd / "model.safetensors", {"format": "pt"})
    config = json.loads((odd / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 0.5, "rope_theta": 10000.0}
    (odd / "config.json").write_text(json.dumps(config))
    rows = [json.dumps({"prompt": "+" * n, "completion": "-" * n}) for n in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    told = ("recipe=sft", f"model.path={odd}", "data.path=rows.jsonl", "train.steps=1", "train.lr=1e-5")
    command = [sys.executable, "-m", "tandem", "train", *(word for each in told for word in ("--set", each))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    left = f"model.path = '{odd}': Qwen3ForCausalLM leaves out 1 of its tensors: odd.weight"
    assert [line.strip() for line in lines if "odd.weight" in line] == [left]
    assert not [line for line in lines if "LOAD REPORT" in line or "UNEXPECTED" in line]
    assert [line for line in lines if "factor field must be a float or int >= 1, got 0.5" in line]


def test_a_package_that_recurrent_layers_lack_is_said_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch):
    text = "`f` is falling back to its reference PyTorch implementation because `causal_conv1d` is not installed."
    logger, handler = transformers.utils.logging.get_logger("transformers.x"), logging.handlers.BufferingHandler(9)
    transformers.utils.logging.add_handler(handler)
    built_model.quiet_transformers()
    for is_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        logger.warning(text)
        logger.warning(text)
        assert len(handler.buffer) == 2 * is_gpu
    transformers.utils.logging.remove_handler(handler)
    assert notes_of(handler.buffer) == [
        "recurrent layers are computed by torch, more slowly, without causal_conv1d; install what is missing"
    ]


def test_a_warning_of_transformers_that_nothing_else_says_is_a_note_once(tmp_path: Path):
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["rope_parameters"] = {"rope_type": "yarn", "factor": 0.5, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(written))
    told = checked(str(tmp_path))[1]
    assert told["notes"] == ["`rope_parameters`'s factor field must be a float or int >= 1, got 0.5"]


def test_a_warning_of_our_own_is_a_note_once_and_what_is_no_warning_is_not():
    def record(name: str, level: int, text: str) -> logging.LogRecord:
        return logging.LogRecord(name, level, "", 0, text, None, None)

    own = record("tandem.model.x", logging.WARNING, "the tokenizer has no end token")
    assert notes_of([own, own, record("tandem.model.x", logging.INFO, "loaded")]) == [own.getMessage()]


@pytest.mark.parametrize("gpu", [(), ("--gpu", "none"), ("--gpu", "cpu")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="without --gpu, the machine is that GPU")
def test_memory_on_a_cpu_is_that_of_the_spec_that_init_writes(gpu: tuple[str, ...], tiny: Path):
    told = checked(str(tiny), *gpu)[1]["memory"]
    assert told["of"] == (
        "SFT as `tandem init` writes it, estimated: rows of 1,024 tokens, batch_size = 16, micro_tokens = 2,048, "
        "activations = 'keep', float32"
    )
    first = parse_spec(tomllib.loads(first_spec(FirstAnswers("imitate", str(tiny), "rows", "none", 0.001))))
    planned = plan_runs.plan_run(first, gpu="cpu", row_tokens=1024)
    assert told["all weights"].startswith(f"{planned.peak_gib:.2f} GiB of ")
    assert "(cpu): fits" in told["all weights"]


@pytest.mark.parametrize(
    ("gpu", "where", "of"),
    [
        ("24", "of 24.0 (a GPU of 24 GiB): fits", "micro_tokens = 4,096, activations = 'recompute', bfloat16"),
        ("4090", "of 24.0 (4090): fits", "micro_tokens = 4,096, activations = 'recompute', bfloat16"),
        ("8", "of 8.0 (a GPU of 8 GiB): fits", "micro_tokens = 2,048, activations = 'recompute', bfloat16"),
    ],
)
def test_the_gpus_of_init_are_those_of_the_check(gpu: str, where: str, of: str, tiny: Path):
    code, told = checked(str(tiny), "--gpu", gpu)
    assert code == 0
    assert where in told["memory"]["LoRA, rank 16"]
    assert told["memory"]["of"].endswith(of)


def test_a_gpu_of_this_machine_is_planned_with_its_own_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_runs, "live_memory", lambda spec: ("h200", 19.6, 19.0))  # a card without figures here
    told = checked(str(tiny))[1]["memory"]
    assert "of 19.6 (this GPU): fits" in told["all weights"]
    assert told["of"].endswith("micro_tokens = 4,096, activations = 'recompute', bfloat16")


def test_an_unknown_gpu_is_an_error_that_names_the_known_ones(tiny: Path):
    with pytest.raises(SpecError, match=r"--gpu 23: choose GiB of memory or a card: none, 8, .*24, .*4090, .*h200"):
        tandem.check_model(tiny, gpu="23")
    done = CliRunner().invoke(app, ["model", "check", str(tiny), "--gpu", "23"])
    assert (done.stdout, type(done.exception), SpecError.exit_code) == ("", SpecError, 2)


def test_an_engine_that_differs_from_the_trainer_is_a_finding(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    scorer = training.scorer

    def shifted(*args: Any) -> Any:
        return lambda row: [logprob + 0.01 for logprob in scorer(*args)(row)]

    monkeypatch.setattr(training, "scorer", shifted)
    code, told = checked(str(tiny))
    assert code == 1
    assert "engine and trainer differ by 0.01 nats a token, where 0.001 is the most in float32" in told["findings"][0]
    assert tandem.check_model(tiny, dtype="bfloat16").passed  # its rounding is wider than that


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "does not close an assistant turn"),
        (CHATML, "does not close an assistant turn"),  # its marks are not special tokens of this tokenizer
    ],
)
def test_a_template_that_cannot_be_used_is_a_finding(template: str, why: str, tiny: Path, tmp_path: Path):
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    (tmp_path / "chat_template.jinja").write_text(template)
    code, told = checked(str(tmp_path))
    assert code == 1
    assert why in told["findings"][0]


def test_what_is_no_model_is_a_finding(tmp_path: Path):
    code, told = checked(str(tmp_path))
    assert code == 1
    assert "has no config.json" in told["findings"][0]


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    """An adapter of `tiny`, as PEFT writes it."""
    spec = PathModel(path=str(tiny), lora=LoraSpec(rank=4))
    policy = built_model.model(spec, Float32Precision(), 0, torch.device("cpu")).policy
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in policy.trainable():
            if ".lora_B." in name:
                tensor.normal_(std=0.05)
    policy.export(tmp_path)
    named_base(tmp_path / "adapter", str(tiny))
    return tmp_path / "adapter"


def named_base(adapter: Path, base: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))


def test_an_adapter_is_checked_on_its_base(tiny: Path, adapter: Path):
    code, told = checked(str(adapter))
    assert (code, told["findings"]) == (0, [])
    assert told["model"]["source"] == f"adapter, rank 4, of {tiny}"
    assert told["model"]["parameters"] == checked(str(tiny))[1]["model"]["parameters"]
    assert told["answer"]["nats a token, engine from trainer"] < 1e-5
    merged = checked(str(adapter.parent))[1]
    assert told["answer"]["is"] == merged["answer"]["is"] != checked(str(tiny))[1]["answer"]["is"]


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (
            "",
            "names no base; write base_model_name_or_path: a model's directory, or a hub id "
            "(`tandem export --base ID` does)",
        ),
        ("/not/here", "model.path = '/not/here': there is no such directory"),
    ],
)
def test_an_adapter_whose_base_is_not_there_is_a_finding_with_the_way_out(base: str, why: str, adapter: Path):
    named_base(adapter, base)
    code, told = checked(str(adapter))
    assert code == 1
    assert why in told["findings"][0]
    assert "base_model_name_or_path" in told["findings"][0]
    assert str(adapter / "adapter_config.json") in told["findings"][0]


def test_a_broken_adapter_is_a_finding_that_names_the_file(adapter: Path):
    (adapter / "adapter_config.json").write_text("{")
    code, told = checked(str(adapter))
    assert (code, "adapter_config.json: cannot be read" in told["findings"][0]) == (1, True)
