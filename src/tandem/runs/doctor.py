"""`tandem doctor`: what this machine can run, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tandem.runs.planner.calibration import gpus_here, ram_gib

State = Literal["ok", "lack", "broken"]
_VLLM = Path(".tandem/vllm/bin/python")
_EXTRAS = {
    "datasets": ("data", "data sets by name, and parquet files"),
    "bitsandbytes": ("quantized", "adapters on a base of 8 or 4 bits"),
    "math_verify": ("math", "gsm8k and math"),
    "gymnasium": ("gymnasium", "gymnasium:ID environments"),
}
"""A module, the extra of the package that brings it, and what it is for."""
_NEEDED = ("torch", "transformers", "peft", "safetensors", "tokenizers", "pydantic")
_TORCH = "import torch; print(torch.__version__, torch.version.cuda or '-', torch.cuda.device_count())"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report. ok; lack: some feature is unavailable; broken: no run can start."""

    name: str
    state: State
    found: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    findings: Sequence[DoctorFinding]

    @property
    def able(self) -> bool:
        return all(each.state != "broken" for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"able": self.able, "findings": [asdict(each) for each in self.findings]}


def diagnose(directory: str | Path = ".") -> Health:
    """Check this machine. `directory`: for the runs. This process imports nothing heavy and changes nothing."""
    place = Path(directory)
    looks: list[Callable[[], list[DoctorFinding]]] = [
        _python, _packages, _torch, _gpus, lambda: _memory(*ram_gib()), lambda: _disk(place), _shared_memory,
        lambda: _vllm(place), _sandbox, _loopback, _open_files, _clock, _extras,
    ]  # fmt: skip
    return Health([finding for look in looks for finding in look()])


def health_text(health: Health) -> str:
    marks = {"ok": "ok    ", "lack": "lack  ", "broken": "BROKEN"}
    width = max(len(each.name) for each in health.findings)
    lines: list[str] = []
    for each in health.findings:
        lines.append(f"{marks[each.state]}  {each.name:<{width}}  {each.found}")
        if each.next_step:
            lines.append(f"{'':8}{'':<{width}}  -> {each.next_step}")
    lacks = sum(each.state == "lack" for each in health.findings)
    able = "this machine can run Tandem" if health.able else "this machine cannot run Tandem as it is"
    return "\n".join([*lines, "", f"{able}; {lacks} optional things are missing; only some runs need them"])


def _python() -> list[DoctorFinding]:
    fine = sys.version_info >= (3, 11)
    return [_state("python", fine, platform.python_version(), "install Python 3.11 or newer", broken=True)]


def _packages() -> list[DoctorFinding]:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    step = 'pip install "tandem-rl[train]"'
    found = f"missing: {', '.join(missing)}" if missing else f"{', '.join(_NEEDED)} are installed"
    return [_state("packages", not missing, found, step, broken=True)]


def _torch() -> list[DoctorFinding]:
    """Import torch in a child process, because a broken build may crash it."""
    done = _ask([sys.executable, "-c", _TORCH], 120)
    if done is None or len(words := done.split()) != 3:
        step = "reinstall torch; `python -c 'import torch'` shows what is wrong"
        return [DoctorFinding("torch", "broken", "cannot be imported", step)]
    build, cuda, count = words
    if cuda == "-":
        has_driver = shutil.which("nvidia-smi") is not None
        step = "there is an NVIDIA driver: install a CUDA build of torch" if has_driver else ""
        return [DoctorFinding("torch", "lack" if has_driver else "ok", f"{build}, for the CPU", step)]
    step = "" if count != "0" else "torch sees no GPU: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return [DoctorFinding("torch", "ok" if count != "0" else "lack", f"{build}, CUDA {cuda}, {count} GPUs", step)]


def _gpus() -> list[DoctorFinding]:
    if shutil.which("nvidia-smi") is None:
        return [
            DoctorFinding(
                "gpus", "lack", "none", "small presets train on the CPU; for larger models, use a machine with a GPU"
            )
        ]
    if not (found := gpus_here()):
        return [DoctorFinding("gpus", "lack", "nvidia-smi does not answer", "check the driver with nvidia-smi")]
    return [_gpu(number, *each) for number, each in enumerate(found)]


def _gpu(number: int, name: str, total_gib: float, free_gib: float) -> DoctorFinding:
    taken = free_gib < 0.9 * total_gib
    step = "another process uses its memory: nvidia-smi shows which" if taken else ""
    found = f"{name}, {total_gib:.0f} GiB, {free_gib:.0f} free"
    return DoctorFinding(f"gpu {number}", "lack" if taken else "ok", found, step)


def _memory(total_gib: float, free_gib: float) -> list[DoctorFinding]:
    found = f"{total_gib:.1f} GiB, {free_gib:.1f} free"
    return [_state("memory", free_gib >= 2, found, "end other programs: imports and a tiny model need 1 GiB")]


def _disk(directory: Path) -> list[DoctorFinding]:
    try:
        free_gib = shutil.disk_usage(directory).free / 2**30
    except OSError as error:
        return [DoctorFinding("disk", "broken", f"{directory}: {error.strerror}", "run where files can be written")]
    if not os.access(directory, os.W_OK):
        return [DoctorFinding("disk", "broken", f"{directory} cannot be written", "run where files can be written")]
    step = "free some space: an export of 1B parameters is 2 to 4 GiB, each checkpoint is larger"
    return [_state("disk", free_gib >= 5, f"{free_gib:.1f} GiB free", step)]


def _shared_memory(place: Path = Path("/dev/shm")) -> list[DoctorFinding]:
    step = "in a container: start it with --shm-size 8g; `shared` on a CPU and adapter files need it"
    if not place.is_dir() or not os.access(place, os.W_OK):
        return [DoctorFinding("shared memory", "lack", f"no {place} to write to", step)]
    free_gib = shutil.disk_usage(place).free / 2**30
    return [_state("shared memory", free_gib >= 1, f"{free_gib:.1f} GiB free in {place}", step)]


def _vllm(directory: Path) -> list[DoctorFinding]:
    python = directory / _VLLM
    if not python.exists():
        step = "`tandem engine install vllm`; until then, engine.kind = 'hf' or 'server'"
        return [DoctorFinding("vllm", "lack", "not installed", step)]
    asked = "from importlib.metadata import version; print(version('vllm'))"
    told = _ask([str(python), "-c", asked], 60)
    return [
        _state(
            "vllm", bool(told), f"vLLM {told}" if told else "its environment is broken", "`tandem engine install vllm`"
        )
    ]


def _sandbox() -> list[DoctorFinding]:
    """Make an empty sandbox, and another namespace in it, as every worker has one."""
    if shutil.which("bwrap") is None:
        return [DoctorFinding("sandbox", "lack", "not installed", "for environment.sandbox: apt install bubblewrap")]
    box = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    able = _ask([*box, "unshare", "--user", "--mount", "--pid", "--fork", "true"], 30) is not None
    found = f"{_ask(['bwrap', '--version'], 30)}{'' if able else ', but this machine allows no user namespaces'}"
    return [_state("sandbox", able, found, "for environment.sandbox: allow user namespaces, or use another machine")]


def _loopback() -> list[DoctorFinding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5):
                return [DoctorFinding("loopback", "ok", f"connected over port {server.getsockname()[1]}")]
    except OSError as error:
        step = "engines, workers and services use 127.0.0.1: allow it in the container or firewall"
        return [DoctorFinding("loopback", "broken", f"127.0.0.1 cannot be reached: {error}", step)]


def _open_files(least: int = 1024) -> list[DoctorFinding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fine = soft == resource.RLIM_INFINITY or soft >= least
    return [_state("open files", fine, f"limit {soft} (can be raised to {hard})", f"ulimit -n {least}")]


def _clock() -> list[DoctorFinding]:
    """Check the date: runs do not depend on it, but certificates and timestamps do."""
    year = time.gmtime().tm_year
    return [_state("clock", 2026 <= year < 2100, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "set the date")]


def _extras() -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    for module, (extra, purpose) in _EXTRAS.items():
        step = f"for {purpose}: pip install 'tandem-rl[{extra}]'"
        there = find_spec(module) is not None
        found.append(_state(f"extra {extra}", there, _version(module) if there else "not installed", step))
    return found


def _state(name: str, fine: bool, found: str, step: str, *, broken: bool = False) -> DoctorFinding:
    return (
        DoctorFinding(name, "ok", found) if fine else DoctorFinding(name, "broken" if broken else "lack", found, step)
    )


def _version(module: str) -> str:
    try:
        return f"{module} {version(module.replace('_', '-'))}"
    except PackageNotFoundError:
        return module


def _ask(command: list[str], timeout_s: float) -> str | None:
    """Run a command; return its output, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
