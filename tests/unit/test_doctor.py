"""`tandem doctor`: each lack is seen, has a next step, and only what no run can do without fails the machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.runs import doctor
from tandem.runs.doctor import DoctorFinding, diagnose, health_text


def test_a_machine_that_runs_these_tests_is_able_and_json_says_so(tmp_path):
    told = CliRunner().invoke(app, ["doctor", "--json", "--dir", str(tmp_path)])
    assert told.exit_code == 0
    said = json.loads(told.stdout)
    assert said["able"]
    names = {each["name"] for each in said["findings"]}
    assert {"python", "packages", "torch", "memory", "disk", "vllm", "loopback", "open files", "clock"} <= names
    assert all(each["next_step"] for each in said["findings"] if each["state"] != "ok")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a program in place of Python, or before all others in the path."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, printed: str, code: int = 0) -> None:
        (folder / name).write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
        (folder / name).chmod(0o700)
        if name == "python":
            monkeypatch.setattr(sys, "executable", str(folder / name))

    put("python", "2.11.0 - 0")
    return put


def found(name: str, directory: Path) -> DoctorFinding:
    (finding,) = (each for each in diagnose(directory).findings if each.name == name)
    return finding


def test_a_torch_that_cannot_be_imported_fails_the_machine(tmp_path, monkeypatch, programs):
    programs("python", "no such module", code=1)
    finding = found("torch", tmp_path)
    assert (finding.state, finding.found) == ("broken", "cannot be imported")
    health = diagnose(tmp_path)
    assert not health.able
    assert "BROKEN" in health_text(health)
    monkeypatch.setattr(doctor, "diagnose", lambda directory: health)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize(
    ("printed", "state", "step"),
    [
        ("2.11.0 13.0 2", "ok", ""),
        ("2.11.0 13.0 0", "lack", "CUDA_VISIBLE_DEVICES"),
        ("2.11.0 - 0", "lack", "CUDA build"),
    ],
)
def test_torch_and_driver_must_fit(tmp_path, programs, printed, state, step):
    programs("python", printed)
    programs("nvidia-smi", "NVIDIA H200, 143771, 143000")
    finding = found("torch", tmp_path)
    assert finding.state == state
    assert step in finding.next_step


def test_a_gpu_that_another_process_holds_is_told(tmp_path, programs):
    programs("nvidia-smi", "NVIDIA H200, 143771, 143000\nNVIDIA H200, 143771, 8000")
    assert found("gpu 0", tmp_path).state == "ok"
    held = found("gpu 1", tmp_path)
    assert held.state == "lack"
    assert "another process" in held.next_step


def test_little_memory_no_disk_and_few_files_are_lacks(tmp_path, monkeypatch, programs):
    monkeypatch.setattr(doctor, "ram_gib", lambda: (16.0, 1.0))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(shutil, "disk_usage", little_shared_memory(shutil.disk_usage))
    health = {each.name: each for each in diagnose(tmp_path / "absent").findings}
    assert health["memory"].state == "lack"
    assert health["disk"].state == "broken"
    assert health["shared memory"].state == "lack"
    assert "--shm-size" in health["shared memory"].next_step
    assert health["open files"].next_step == "ulimit -n 1024"


def little_shared_memory(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda path: SimpleNamespace(free=2**20) if str(path) == "/dev/shm" else plain(path)


def test_a_machine_without_bubblewrap_or_user_namespaces_lacks_the_sandbox(tmp_path, monkeypatch, programs):
    programs("bwrap", "bubblewrap 0.8.0", code=1)
    finding = found("sandbox", tmp_path)
    assert (finding.state, "user namespaces" in finding.found) == ("lack", True)
    programs("bwrap", "bubblewrap 0.8.0")
    assert (found("sandbox", tmp_path).state, found("sandbox", tmp_path).found) == ("ok", "bubblewrap 0.8.0")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install bubblewrap" in found("sandbox", tmp_path).next_step


def test_a_vllm_environment_that_is_there_and_broken_is_told(tmp_path, programs):
    assert "install vllm" in found("vllm", tmp_path).next_step
    python = tmp_path / ".tandem/vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    assert found("vllm", tmp_path).found == "its environment is broken"
    python.write_text("#!/bin/sh\necho 0.26.0\n")
    assert found("vllm", tmp_path) == DoctorFinding("vllm", "ok", "vLLM 0.26.0")


def test_an_extra_that_is_missing_names_how_to_get_it(tmp_path, monkeypatch, programs):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert found("extra data", tmp_path).next_step == (
        "for data sets by name, and parquet files: pip install 'tandem-rl[data]'"
    )
