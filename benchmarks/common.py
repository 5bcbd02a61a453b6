"""Tables for the terminal, the line that says where they come from, and which processes are ranks."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def note(text: str) -> None:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads"
    print(f"{text}\n{datetime.date.today()}, Python {platform.python_version()}, {versions}\n")


def children_of(pid: int) -> list[int]:
    """Return the processes that this one started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Return all processes below this one, each before its own."""
    return [each for child in children_of(pid) for each in (child, *descendants(child))]


def rank_of(pid: int) -> int:
    """Return which rank of a trainer a process is; -1 if it is none."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return next((int(word.removeprefix(b"RANK=")) for word in words if word.startswith(b"RANK=")), -1)
