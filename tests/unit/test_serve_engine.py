"""Which engine `tandem serve` takes where none is named, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.errors import SpecError
from tandem.recipes import serve
from tandem.recipes.serve import engine_here
from tandem.spec.engine import HfEngineSpec, VllmEngineSpec


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a machine with a GPU, where vLLM is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve.built_model, "pick_device", lambda _: torch.device("cuda"))
    python = tmp_path / ".tandem" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert Path(serve.standalone_engines.default_python()).exists()
    return python


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


@pytest.mark.usefixtures("vllm")
def test_vllm_serves_on_a_gpu_where_it_is_installed(capsys: pytest.CaptureFixture[str]):
    assert engine_here("model", ["max_running=8"]) == VllmEngineSpec(max_running=8)
    assert said(capsys) == "vLLM serves: it is installed (--engine hf: the embedded one)"


def test_without_vllm_the_embedded_engine_serves_and_says_how_to_get_it(vllm: Path, capsys: pytest.CaptureFixture[str]):
    vllm.unlink()
    assert engine_here("model") == HfEngineSpec()
    told = said(capsys)
    assert told == "the embedded engine serves: vLLM is not installed; `tandem engine install vllm` does that"


def test_a_run_that_sampled_with_a_vllm_of_its_own_is_served_by_it(vllm: Path, tmp_path: Path):
    own = vllm.rename(tmp_path / "own-python")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.toml").write_text(
        f'recipe = "rl"\nmodel = {{ preset = "tiny" }}\nengine = {{ kind = "vllm", python = "{own}" }}\n'
        'environment = { name = "digits" }\n'
        "train = { steps = 1, lr = 1e-3, groups_per_step = 1, group_size = 2, max_tokens = 4 }\n"
    )
    assert engine_here("model").kind == "hf"
    assert engine_here(tmp_path / "run").kind == "vllm"


@pytest.mark.usefixtures("vllm")
def test_a_setting_of_one_engine_chooses_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert engine_here("model", ["kv_gib=2"]) == HfEngineSpec(kv_gib=2)
    assert said(capsys) == "the embedded engine serves: vLLM does not have the setting kv_gib"
    monkeypatch.setattr(serve.built_model, "pick_device", lambda _: torch.device("cpu"))
    assert engine_here("model") == HfEngineSpec()
    assert said(capsys) == "the embedded engine serves: there is no GPU"
    assert engine_here("model", ["memory_share=0.5"]) == VllmEngineSpec(memory_share=0.5)
    assert said(capsys) == "vLLM serves: only vLLM has the setting memory_share (--engine hf: the embedded one)"


@pytest.mark.usefixtures("vllm")
def test_a_setting_that_neither_has_is_refused_before_anything_is_said(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SpecError, match="kv_gb"):
        engine_here("model", ["kv_gb=2"])
    assert said(capsys) == ""
