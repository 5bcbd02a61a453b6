"""Measure the additional memory of an operation and the copy speed of this machine, for benchmarks.

On a CPU this is the kernel's peak of resident memory, of this process and all its descendants (Linux). The peaks may be
at different times, so their sum is an upper bound. Shared pages count for each process, and files in memory-backed
storage count while they are mapped. On a GPU it is the peak use of all devices together, by any process, sampled every
millisecond.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

_LOOK_EVERY_S = 0.001
_COPIED_BYTES = 2**28
_COPIES = 5


class ProcessMemory:
    """Measures from its creation."""

    def __init__(self) -> None:
        self._before = _resident()
        for pid in self._before:
            _write(pid, "clear_refs", "5")  # resets the peak

    def extra_bytes(self) -> int | None:
        """Return the additional peak; None if the kernel does not report it. A process that began meanwhile counts in
        full; one that ended does not count."""
        if not self._before:
            return None
        return sum(max(0, peak - self._before.get(pid, 0)) for pid, peak in _resident(peak=True).items())


class DeviceMemory:
    """Measures all GPUs that this process sees, inside a `with` block."""

    def __enter__(self) -> DeviceMemory:
        torch.cuda.synchronize()
        self._before = self._least = self._free()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self._look()

    @property
    def extra_bytes(self) -> int:
        return self._before - self._least

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        self._least = min(self._least, self._free())

    def _free(self) -> int:
        return sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))


def copy_bytes_per_s(device: torch.device | str, to: torch.device | str | None = None) -> float:
    """Return the speed of one large copy, the best of a few: within a device's memory, or to another device."""
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source, device=to or device)
    seconds: list[float] = []
    for _ in range(_COPIES):
        _settle(source.device)
        started = time.perf_counter()
        target.copy_(source)
        _settle(source.device)
        seconds.append(time.perf_counter() - started)
    return _COPIED_BYTES / min(seconds)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        for each in range(torch.cuda.device_count()):
            torch.cuda.synchronize(each)


# --- /proc


def _resident(*, peak: bool = False) -> dict[int, int]:
    """Return bytes by process; empty without /proc."""
    found: dict[int, int] = {}
    for pid in _family():
        for line in _read(pid, "status").splitlines():
            if line.startswith("VmHWM:" if peak else "VmRSS:"):
                found[pid] = int(line.split()[1]) * 1024
    return found


def _family() -> list[int]:
    """Return this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _read(int(path.name), "stat").rpartition(")")[2].split()  # a process name may contain anything
        if fields:
            children.setdefault(int(fields[1]), []).append(int(path.name))
    family, unseen = [], [os.getpid()]
    while unseen:
        family.append(pid := unseen.pop())
        unseen += children.get(pid, [])
    return family


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return ""


def _write(pid: int, name: str, text: str) -> None:
    with suppress(OSError):
        Path(f"/proc/{pid}/{name}").write_text(text, encoding="utf-8")
