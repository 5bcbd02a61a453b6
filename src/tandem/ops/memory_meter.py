"""What memory an undertaking takes beyond what was there, and how fast this machine copies: for benchmarks.

On a CPU: the peak of the resident memory of this process and all its descendants, as the kernel keeps it (Linux). Each
one's peak counts, whenever it came, so the sum is an upper bound; pages that several of them map count for each; files
in memory-backed storage count while they are mapped. On a GPU: the most that was taken on all devices together, by
whomever, looked at every millisecond.
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
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._before = _resident()
        for pid in self._before:
            _write(pid, "clear_refs", "5")  # the peak is from now on

    def extra_bytes(self) -> int | None:
        """None where the kernel does not say. A process that began meanwhile counts whole; one that ended, not at all:
        neither what it took nor what it gave back."""
        if not self._before:
            return None
        return sum(max(0, peak - self._before.get(pid, 0)) for pid, peak in _resident(peak=True).items())


class DeviceMemory:
    """Of all GPUs that this process sees. Used with `with`."""

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
    """Of one large copy, the best of a few: from a device's memory to itself, or to another one's."""
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
    """Bytes by process; empty where there is no /proc."""
    found: dict[int, int] = {}
    for pid in _family():
        for line in _read(pid, "status").splitlines():
            if line.startswith("VmHWM:" if peak else "VmRSS:"):
                found[pid] = int(line.split()[1]) * 1024
    return found


def _family() -> list[int]:
    """This process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _read(int(path.name), "stat").rpartition(")")[2].split()  # a name may hold anything
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
