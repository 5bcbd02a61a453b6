"""`tandem engine check` with a real vLLM: all that a CPU allows passes, and only then is the version recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_cpu import PYTHON

from tandem.build import built_model, standalone_engines
from tandem.recipes import engine_commands
from tandem.spec.model import PresetModel
from tandem.spec.precision import Float32Precision

REQUESTS, BRIDGES = 5, ["shared", "broadcast", "adapter", "adapter_broadcast", "disk", "restart"]


@pytest.mark.timeout(900)
def test_it_passes_all_that_a_cpu_allows_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorded: list[tuple[str, str, list[str]]] = []

    def record(python: str, version: str, checks: list[str]) -> Path:
        recorded.append((python, version, checks))  # not in the environment: others use it
        return tmp_path / "record.json"

    monkeypatch.setattr(standalone_engines, "record_passed", record)
    found = engine_commands.check_engine(str(PYTHON), device="cpu", tell=print)
    assert [str(check) for check in found.checks if check.state == "failed"] == []
    assert [check.name for check in found.checks if check.state == "not here"] == []
    ((python, version, checks),) = recorded
    assert (python, version) == (str(PYTHON), found.version)
    assert checks[REQUESTS:] == BRIDGES


@pytest.mark.timeout(600)
def test_one_model_is_compared_by_prompts_of_its_own(tmp_path: Path):
    preset = built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, torch.device("cpu"))
    preset.policy.export(tmp_path)
    found = engine_commands.check_engine(str(PYTHON), model=str(tmp_path), device="cpu", tell=print)
    assert found.passed
    assert len(found.checks) == REQUESTS
    assert any(" nats a token in each of 16 answers" in check.why for check in found.checks)
