"""Identify a process by pid and start time, because pids are reused (Linux; elsewhere the identity is empty)."""

from __future__ import annotations

import os
import time
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """Return a process's identity; empty if there is no such process. Default: this process."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"  # a zombie counts as ended


def is_there(process: str) -> bool:
    """Return whether the process exists; a stopped one does."""
    pid = process.partition(":")[0]
    return pid.isdecimal() and identity(int(pid)) == process


def age_s() -> float:
    """Return for how many seconds this process has existed; 0 where that is not known."""
    ticks = identity().partition(":")[2]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0
