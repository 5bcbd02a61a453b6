"""What an online server learned, as files: adapters too, and what cannot be exported says why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.build import built_model, online, training
from tandem.errors import CheckpointError, RunError
from tandem.online.job_store import JobStore
from tandem.online.version_store import VersionStore
from tandem.recipes.export import export_run
from tandem.recipes.online_export import find_learned, keep_spec
from tandem.recipes.serve import find_model
from tandem.spec.model import PresetModel
from tandem.spec.online import OnlineSpec, parse_online_spec
from tandem.spec.precision import Float32Precision

IDS = torch.arange(24)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model"
    training.export(
        built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, built_model.pick_device("cpu")), path
    )
    return path


def taught(home: Path, spec: OnlineSpec) -> torch.Tensor:
    """A data directory with version 0, whose weights are no longer those of the base; its logits."""
    keep_spec(spec, home)
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.pick_device("cpu"))
    online.choose_trained(spec, model)
    live = dict(model.policy.trainable())
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in live.values():
            tensor.add_(0.05 * torch.randn_like(tensor))
    VersionStore(home / "versions").anchor(0, live)
    store = JobStore(home / "jobs")
    asyncio.run(store.first(0, "digest"))
    store.close()
    return logits(model.policy.module)


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_adapters_go_home_as_an_adapter_and_are_served_merged(tmp_path: Path, base: Path):
    expected = taught(tmp_path, parse_online_spec({"model": {"path": str(base), "lora": {"rank": 4}}}))
    adapter = export_run(tmp_path)
    assert {path.name for path in adapter.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
    }
    whole: Any = AutoModelForCausalLM.from_pretrained(base)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(whole, adapter)), expected, atol=1e-5, rtol=0)
    path, name, version = find_model(str(tmp_path))
    assert (name, version) == ("online", 0)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(path)), expected, atol=1e-4, rtol=0)
    assert find_model(str(tmp_path / "versions" / "anchor-000000"))[0] == path, "written once"


def test_a_part_of_the_weights_is_put_back_into_the_model_that_it_is_of(tmp_path: Path, base: Path):
    expected = taught(tmp_path, parse_online_spec({"model": {"path": str(base)}}))
    whole: Any = AutoModelForCausalLM.from_pretrained(export_run(tmp_path, version="anchor-0"))
    assert torch.equal(logits(whole), expected)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base)), expected)


def test_what_cannot_be_exported_says_why(tmp_path: Path, base: Path):
    home = tmp_path / "data"
    home.mkdir()
    taught(home, parse_online_spec({"model": {"path": str(base)}}))
    with pytest.raises(CheckpointError, match="version 5 does not exist; there are: 0"):
        export_run(home, version="5")
    with pytest.raises(RunError, match="version 'last': write a number, anchor-N or current"):
        export_run(home, version="last")
    with pytest.raises(RunError, match="has no steps; use --version, not --step"):
        export_run(home, step=3)
    (home / "spec.json").unlink()
    with pytest.raises(RunError, match="start `tandem online serve SPEC` on it once"):
        export_run(home)
    assert find_learned(base) is None
    with pytest.raises(RunError, match="has no --version; use --step"):
        export_run(base, version="3")
