"""Identify a process by pid and start time, since a pid alone is reused (Linux; elsewhere none is found)."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """Empty if there is none."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"  # a zombie writes no more


def is_there(process: str) -> bool:
    """Stopped is there, too."""
    pid = process.partition(":")[0]
    return pid.isdecimal() and identity(int(pid)) == process
