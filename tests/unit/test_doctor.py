"""`tandem doctor`: each lack is seen, has a next step, and only what no run can do without fails the machine."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.runs import doctor
from tandem.runs.doctor import DoctorFinding, Health, health_text


def test_a_machine_that_runs_these_tests_is_able_and_json_says_so(tmp_path):
    told = CliRunner().invoke(app, ["doctor", "--json", "--dir", str(tmp_path)])
    assert told.exit_code == 0
    said = json.loads(told.stdout)
    assert said["able"]
    names = {each["name"] for each in said["findings"]}
    assert {"python", "packages", "torch", "memory", "disk", "vllm", "loopback", "open files", "clock"} <= names
    assert all(each["next_step"] for each in said["findings"] if each["state"] != "ok")


def test_a_torch_that_cannot_be_imported_fails_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH", "import nothing_of_this_name")
    (finding,) = doctor._torch()
    assert (finding.state, finding.found) == ("broken", "cannot be imported")
    health = Health([finding])
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
def test_torch_and_driver_must_fit(monkeypatch, printed, state, step):
    monkeypatch.setattr(doctor, "_TORCH", f"print('{printed}')")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = doctor._torch()
    assert finding.state == state
    assert step in finding.next_step


def test_a_gpu_that_another_process_holds_is_told():
    assert doctor._gpu(0, "NVIDIA H200, 143771, 143000").state == "ok"
    held = doctor._gpu(1, "NVIDIA H200, 143771, 8000")
    assert (held.name, held.state) == ("gpu 1", "lack")
    assert "another process" in held.next_step


def test_little_memory_no_disk_and_few_files_are_lacks(tmp_path):
    assert doctor._memory(16.0, 1.0)[0].state == "lack"
    assert doctor._disk(tmp_path / "absent")[0].state == "broken"
    assert doctor._shared_memory(tmp_path / "absent")[0].next_step
    assert doctor._open_files(least=10**9)[0].next_step == "ulimit -n 1000000000"


def test_a_vllm_environment_that_is_there_and_broken_is_told(tmp_path):
    assert "install vllm" in doctor._vllm(tmp_path)[0].next_step
    python = tmp_path / ".tandem/vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    assert doctor._vllm(tmp_path)[0].found == "its environment is broken"
    python.write_text("#!/bin/sh\necho 0.26.0\n")
    assert doctor._vllm(tmp_path)[0] == DoctorFinding("vllm", "ok", "vLLM 0.26.0")


def test_an_extra_that_is_missing_names_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "_EXTRAS", {"nothing_of_this_name": ("more", "some things")})
    assert doctor._extras()[0].next_step == "for some things: pip install 'tandem-rl[more]'"
