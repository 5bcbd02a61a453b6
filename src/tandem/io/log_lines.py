"""Read lines of a run's logs with their numbers, from the end, whatever their size."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import RunError, SpecError

LOGS = ("log.txt", "console.txt", "events.jsonl", "attempts.jsonl", "ranks/*.txt")
_TAIL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class LogLines:
    lines: list[dict[str, int | str]]
    """The number and the text of each, the oldest first."""
    in_file: int


def read_log(run_dir: Path, file: str, last: int, before: int = 0) -> LogLines:
    """Return the `last` lines of a log, or of those before line `before`; nothing older than a MiB before its end."""
    if not any(fnmatch.fnmatchcase(file, each) for each in LOGS) or ".." in file:
        raise SpecError(f"file = {file[:80]!r}: must be one of {', '.join(LOGS)}")
    if not (run_dir / file).is_file():
        raise RunError(f"the run has no {file}")
    with (run_dir / file).open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        skipped = 0
        for start in range(0, max(0, size - _TAIL_BYTES), 2**16):
            opened.seek(start)
            skipped += opened.read(min(2**16, size - _TAIL_BYTES - start)).count(b"\n")
        text = opened.read().decode(errors="replace")
    lines = list(enumerate(text.splitlines(), skipped + 1))
    shown = [each for each in lines if not before or each[0] < before][-max(1, last) :]
    return LogLines([{"line": number, "text": said} for number, said in shown], skipped + len(lines))
