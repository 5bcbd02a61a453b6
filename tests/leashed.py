"""The program behind a Child, which has it on a leash."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def programs_below() -> set[int]:
    """Programs on a leash of this process; one that is starting may not be there yet."""
    return {program for leash in children(os.getpid()) for program in children(leash)}


def children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, thread.read_text().split())
    return found


def program_of(child: Any) -> int:
    leash = child._leash.pid
    while not (found := Path(f"/proc/{leash}/task/{leash}/children").read_text().split()):
        time.sleep(0.02)
    return int(found[0])
