"""Models written as GGUF files: what is read back is the model to the bit, or within what few bits lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import random_model  # noqa: E402
from test_gguf import configs, written  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tandem.io.gguf import families  # noqa: E402
from tandem.io.gguf.directory import model_directory  # noqa: E402
from tandem.io.gguf.header import read_gguf  # noqa: E402
from tandem.io.gguf.writer import write_gguf  # noqa: E402
from tandem.model.load_checkpoint import load_model  # noqa: E402


@pytest.fixture(autouse=True)
def _in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def directory_of(place: Path, arch: str = "llama") -> Path:
    """A model directory as transformers writes it, with the tokenizer of a GGUF file."""
    place.mkdir()
    path, _ = written(place / "source.gguf", arch)
    read = Path(model_directory(str(path)))
    model = random_model(configs()[arch][0])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (place / name).write_bytes((read / name).read_bytes())
    path.unlink()
    model.save_pretrained(place)
    return place


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_a_model_is_read_back_to_the_bit(arch: str, tmp_path: Path):
    source = directory_of(tmp_path / "model", arch)
    report = write_gguf(source, tmp_path / "back.gguf", "f32")
    model, back = (load_model(str(path), "main", "eager") for path in (source, report.path))
    assert type(model) is type(back)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert (back(ids).logits - model(ids).logits).abs().max() < 1e-6
    if not arch.startswith("gemma"):  # x + 1 - 1 is not x
        assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    mine, theirs = (
        Tokenizer.from_file(str(path / "tokenizer.json")) for path in (source, Path(model_directory(str(report.path))))
    )
    assert mine.encode("hello hello 12<|im_end|>é").ids == theirs.encode("hello hello 12<|im_end|>é").ids


@pytest.mark.parametrize(
    ("kind", "error", "size"), [("f16", 3e-4, 0.52), ("bf16", 2e-3, 0.52), ("q8_0", 7e-3, 0.30), ("q4_1", 0.12, 0.22)]
)
def test_few_bits_lose_what_they_must_and_no_more(kind: Any, error: float, size: float, tmp_path: Path):
    source = directory_of(tmp_path / "model")
    whole = write_gguf(source, tmp_path / "whole.gguf", "f32")
    report = write_gguf(source, tmp_path / "few.gguf", kind)
    assert 0 < max(report.errors.values()) < error
    assert report.errors["F32"] == 0  # norms
    weights = sum(torch.Size(tensor.shape).numel() for tensor in read_gguf(whole.path).tensors.values())
    assert whole.size_bytes - report.size_bytes > (1 - size) * 4 * weights * 0.97
    kinds = {gguf.GGMLQuantizationType(tensor.kind).name for tensor in read_gguf(report.path).tensors.values()}
    assert kinds == {"F32", kind.upper()} | ({"Q8_0"} if kind == "q4_1" else set())


def test_a_tensor_in_another_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = directory_of(tmp_path / "model")
    monkeypatch.setattr("tandem.io.gguf.writer.store", lambda file, name, values: values)
    with pytest.raises(ValueError, match=r"[qk]_proj.weight was read back with an error of 1\.\d+: it is not the same"):
        write_gguf(source, tmp_path / "m.gguf", "q8_0")


def test_llama_3_scaling_is_written_as_factors(tmp_path: Path):
    source = directory_of(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    report = write_gguf(source, tmp_path / "m.gguf", "f32")
    assert families.config_of(read_gguf(report.path))["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": "mamba"}, "its model_type is 'mamba'; those that are written as GGUF files are llama, qwen2"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "its rotary scaling is 'dynamic'"),
        ({"hidden_act": "gelu"}, "a GGUF file cannot say its config: hidden_act is gelu, and would be silu"),
    ],
)
def test_what_a_file_cannot_say_is_refused(changed: dict[str, Any], why: str, tmp_path: Path):
    source = directory_of(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ValueError, match=why):
        write_gguf(source, tmp_path / "m.gguf", "f32")


def test_a_tokenizer_that_cuts_otherwise_is_refused(tmp_path: Path):
    source = directory_of(tmp_path / "model")
    told = json.loads((source / "tokenizer.json").read_text())
    told["normalizer"] = {"type": "Lowercase"}
    (source / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"its tokenizer cuts text as none that is known here .*qwen2: 'Hello"):
        write_gguf(source, tmp_path / "m.gguf", "f32")


def test_a_vocabulary_without_merges_is_refused_because_llama_cpp_refuses_it(tmp_path: Path):
    from tandem.model.presets import make_model
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    make_model("tiny", tokenizer, 0, "sdpa").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no merges, as those of model\.preset"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf", "q8_0")


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_exported_as_a_gguf_file_with_a_card(tmp_path: Path):
    from tandem.errors import RunError
    from tandem.io.atomic_write import write_json
    from tandem.recipes.export import export_run

    run = tmp_path / "run"
    run.mkdir()
    directory_of(run / "export")
    write_json(run / "status.json", {"state": "succeeded", "name": "sums", "recipe": "sft", "eval": {}})
    (run / "spec.toml").write_text(
        'recipe = "sft"\n[model]\npath = "org/base"\n[data]\npath = "a.jsonl"\n[train]\nsteps = 3\nlr = 0.001\n'
    )
    copy = export_run(run, gguf="q8_0")
    assert copy == run / "deploy-gguf"
    assert sorted(path.name for path in copy.iterdir()) == ["Modelfile", "README.md", "model-q8_0.gguf"]
    assert (copy / "Modelfile").read_text().startswith("FROM ./model-q8_0.gguf\n")
    assert "`ollama create NAME -f Modelfile`" in (copy / "README.md").read_text()
    assert "A GGUF file of kind q8_0" in (copy / "README.md").read_text()
    assert load_model(str(copy), "main", "sdpa").config.model_type == "llama"
    config = json.loads((run / "export" / "config.json").read_text())
    (run / "export" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(RunError, match="--gguf q8_0: its model_type is 'mamba'"):
        export_run(run, gguf="q8_0")
    assert (copy / "model-q8_0.gguf").exists()  # the earlier export
