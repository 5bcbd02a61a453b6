"""KTO and ORPO by adapters on a GGUF file: stopped, resumed to the same bytes, and exported as a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import tandem
from tandem.cli.main import app

pytest.importorskip("gguf", reason="the package gguf is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from gguf_files import SIZES, random_model, write

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")

DATA = Path(__file__).parents[2] / "examples" / "data"
STOPS = """
class Stop:
    def on_step(self, step):
        assert step.version < 5, "as planned"
"""


def spec(kind: str, home: Path) -> dict[str, Any]:
    return {
        "recipe": "preference", "algorithm": {"kind": kind},
        "model": {"path": str(home / "base.gguf"), "lora": {"rank": 8}},
        "data": {"path": str(DATA / {"kto": "thumbs.csv", "orpo": "pairs.jsonl"}[kind]), "eval_share": 0.4},
        "train": {"steps": 10, "batch_size": 16, "lr": 3e-3}, "checkpoint": {"every": 2},
        "callbacks": [f"{home}/stop.py:Stop"],
    }  # fmt: skip


def logits_of(directory: Path, gguf: str = "") -> torch.Tensor:
    options = {"gguf_file": gguf, "dtype": torch.float32} if gguf else {}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    with torch.no_grad():
        return model(torch.arange(40, 100)[None]).logits[0]


@pytest.mark.parametrize("kind", ["kto", "orpo"])
def test_adapters_learn_are_resumed_and_leave_as_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    write(tmp_path / "base.gguf", "llama", random_model(config), "Q8_0")
    (tmp_path / "stop.py").write_text(STOPS.replace("< 5", "< 50"))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ended = tandem.run(spec(kind, tmp_path), whole).status
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")
    (tmp_path / "stop.py").write_text(STOPS)
    with pytest.raises(Exception, match="as planned"):
        tandem.run(spec(kind, tmp_path), stopped)
    (tmp_path / "stop.py").write_text(STOPS.replace("< 5", "< 50"))
    tandem.resume(stopped)
    assert tandem.digest_run(stopped) == tandem.digest_run(whole)
    assert json.loads((whole / "export" / "adapter" / "adapter_config.json").read_text())["r"] == 8
    told = CliRunner().invoke(app, ["export", str(whole), "--gguf", "q8_0"])
    (file,) = Path(told.stdout.strip()).glob("*.gguf")
    assert f"cd {file.parent} && ollama create" in told.stderr
    apart = (logits_of(file.parent, file.name) - logits_of(whole / "export")).abs().mean()
    moved = (logits_of(whole / "export") - logits_of(stopped / "export")).abs().max()
    assert moved == 0
    assert 0 < float(apart) < 0.02
