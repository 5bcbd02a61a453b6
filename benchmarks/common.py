"""Tables for the terminal, and the line that says where they come from."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def note(text: str) -> None:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads"
    print(f"{text}\n{datetime.date.today()}, Python {platform.python_version()}, {versions}\n")
