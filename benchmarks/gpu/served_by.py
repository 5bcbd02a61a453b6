"""A callback that says which start of an engine sampled each trained token: `callbacks = ["served_by.py:ServedBy"]`.

It looks at every answer that comes from an engine, with the boot id of the engine that was asked; an engine refuses a
request for another boot id. `served-by.jsonl` in the run's directory gets a row for each step, and one for each request
that an engine did not answer to its end.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.engine.server.connection import Connection
from tandem.types import Completion

Answer = tuple[tuple[int, ...], tuple[int, ...]]  # token ids, and their versions
Row = dict[str, Any]
NOBODY = "nobody"


class ServedBy:
    def __init__(self) -> None:
        self._boots: dict[Answer, set[str]] = {}
        self._path = Path()

    def on_start(self, directory: Path) -> None:
        self._path = directory / "served-by.jsonl"
        complete, seen = Connection.complete, self

        async def watched(self: Connection, *asked: Any, **named: Any) -> Completion:
            boot = self.boot_id
            try:
                answer = await complete(self, *asked, **named)
            except BaseException as error:
                seen._write(cut=boot, error=type(error).__name__)
                raise
            seen._boots.setdefault((tuple(answer.ids), tuple(answer.versions)), set()).add(boot)
            return answer

        setattr(Connection, "complete", watched)  # noqa: B010 - it is another function's place

    def on_step(self, step: Any) -> None:
        tokens = step.tokens
        served: Counter[tuple[str, int]] = Counter()
        for sample in range(len(tokens.task_ids)):
            of_sample = (tokens.sample_T == sample) & tokens.mask_T
            versions = tokens.versions_T[of_sample].tolist()
            boots = self._boots.get((tuple(tokens.ids_T[of_sample].tolist()), tuple(versions)), {NOBODY})
            # Two engines may have given the same short answer: then both must have proven its version.
            served.update(("+".join(sorted(boots)), version) for version in versions)
        rows = [(boot, version, count) for (boot, version), count in sorted(served.items())]
        self._write(
            step=step.version, tasks=groups_of(tokens.task_ids, tokens.group_S.tolist()), served=rows,
            tokens=int(tokens.mask_T.sum()),
        )  # fmt: skip

    def _write(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), **row}) + "\n")


def groups_of(task_ids: Sequence[str], group_S: Sequence[int]) -> list[tuple[str, int]]:
    """Return the task and the number of samples of each group."""
    tasks = dict(zip(group_S, task_ids, strict=True))
    return [(tasks[group], count) for group, count in sorted(Counter(group_S).items())]


# --- what the rows say


def lost_groups(steps: list[Row], expected: Sequence[str], size: int) -> tuple[int, list[str]]:
    """Return how many groups were not trained, and what else is odd about the groups. `expected`: the tasks of the
    first tickets, in their order, one for each group that a run without losses trains."""
    trained = [(task, count) for row in steps for task, count in row["tasks"]]
    names = [task for task, _ in trained]
    lost = (Counter(expected) - Counter(names)).total()
    odd = [f"group of {task} has {count} samples" for task, count in trained if count != size]
    if names != expected:
        at = next((n for n, pair in enumerate(zip(expected, names, strict=False)) if pair[0] != pair[1]), len(names))
        odd.append(f"{len(names)} groups of {len(expected)} were trained, and number {at} is not the one of its ticket")
    return lost, odd


def unproven_tokens(steps: list[Row], ledger: list[Row], max_lag: int) -> tuple[int, int, list[str]]:
    """Return how many trained tokens there are, how many of them are unproven, and which."""
    proven: dict[tuple[str, int], int] = {}
    first: dict[int, int] = {}
    for line, row in enumerate(ledger):
        first.setdefault(row["version"], line)
        for boot in row["engines"]:
            proven.setdefault((boot, row["version"]), line)
    total, odd = Counter[str](), list[str]()
    for row in steps:
        made = first.get(row["step"], len(ledger))  # the step was trained before its version was published
        total["tokens"] += row["tokens"]
        for boots, version, count in row["served"]:
            unproven = any(proven.get((boot, version), made) >= made for boot in boots.split("+"))
            if unproven or row["step"] - 1 - version > max_lag:
                why = "without a proof before" if unproven else "too old"
                odd.append(f"step {row['step']}: {count} tokens of version {version} by {boots[:8]}: {why}")
                total["odd"] += count
        if sum(count for *_, count in row["served"]) != row["tokens"]:
            odd.append(f"step {row['step']}: {row['tokens']} tokens are trained, and others were served")
    return total["tokens"], total["odd"], odd
