"""Report which rows were used, and why others were dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dropped:
    source: str
    row: int
    reason: str


@dataclass(slots=True)
class ValidationReport:
    """The number of rows read, and the dropped rows with their reasons."""

    read: int = 0
    dropped: list[Dropped] = field(default_factory=list[Dropped])
    kinds: Counter[str] = field(default_factory=Counter[str])
    """How many rows were understood as what."""

    def drop(self, source: str, row: int, reason: str) -> None:
        self.dropped.append(Dropped(source, row, reason))

    @property
    def used(self) -> int:
        return self.read - len(self.dropped)

    def by_reason(self) -> dict[str, int]:
        """Return counts by reason, the most frequent first."""
        return dict(Counter(row.reason for row in self.dropped).most_common())

    def text(self, num_examples: int = 3) -> str:
        """Return a summary line, then a line per reason with its first rows."""
        kinds = ", ".join(f"{name} ({count})" for name, count in self.kinds.most_common())
        if len(self.kinds) == 1:
            kinds = next(iter(self.kinds))
        known = f" as {kinds}" if kinds else ""
        lines = [f"{self.read} rows read{known}, {self.used} used, {len(self.dropped)} left out"]
        for reason, count in self.by_reason().items():
            rows = [f"{row.source}:{row.row}" for row in self.dropped if row.reason == reason]
            more = ", ..." if count > num_examples else ""
            lines.append(f"  {count} x {reason} ({', '.join(rows[:num_examples])}{more})")
        return "\n".join(lines)
