"""Follow the rows that a run appends to metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.io.bounded_json import parsed

_MOST_BYTES = 2**20
"""At one look; the rest comes at the next."""


class Follower:
    def __init__(self, run_dir: Path, start: int = -1) -> None:
        """`start`: a byte offset that `rows` returned; -1: the end of the file now."""
        self._file = run_dir / "metrics.jsonl"
        self.at = self._size() if start < 0 else start
        """The offset behind the last row that was returned."""

    def rows(self) -> list[tuple[int, Any]]:
        """Return the rows since the last call, each with the offset behind it. A file that became shorter was
        cut by a resume, and begins again at its end."""
        size = self._size()
        self.at = min(self.at, size)
        if size == self.at:
            return []
        with self._file.open("rb") as opened:
            opened.seek(self.at)
            found = opened.read(_MOST_BYTES)
        rows: list[tuple[int, Any]] = []
        for line in found.split(b"\n")[:-1]:
            self.at += len(line) + 1
            try:
                rows.append((self.at, parsed(line)))
            except ValueError:  # a damaged line; the audit names it
                continue
        if b"\n" not in found and len(found) == _MOST_BYTES:  # a row that no page wants
            self.at += len(found)
        return rows

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0
