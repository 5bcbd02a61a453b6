"""Store each evaluation in its own file: `evals/step-<version>[-n].json`. No file is ever overwritten."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.jsonl import finite
from tandem.spec.run import RlSpec
from tandem.types import Measure


@dataclass(frozen=True, slots=True)
class StoredEval:
    version: int
    when: str
    """before, before_rl, step 20, after; of `tandem eval`: eval."""
    metric: Measure
    protocol: Mapping[str, Any]
    """The settings: two evaluations with the same protocol can be compared."""
    tasks: Sequence[str]
    scores: Sequence[float]
    failed: int = 0
    at: str = ""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    def pairs_with(self, other: StoredEval) -> bool:
        """Return whether both scored the same tasks, in the same order and in the same way."""
        return (self.metric, list(self.tasks)) == (other.metric, list(other.tasks)) and self.protocol == other.protocol


def played_as(spec: RlSpec) -> dict[str, Any]:
    """Return the settings that two evaluations on an environment must share to be compared."""
    assert spec.environment is not None, "this run has no environment"
    return {
        "environment": spec.environment.name,
        "params": spec.environment.model_dump(mode="json")["params"],
        "judge": spec.environment.judge.kind,
        "split": "eval",
        "seed": spec.seed,
        "max_tokens": spec.eval.max_tokens or spec.train.max_tokens,
        "temperature": 0.0,
        "thinking": spec.model.thinking,
    }


def store_eval(directory: Path, found: StoredEval) -> Path:
    """Write an evaluation under the first free name and return the path. The file appears complete or not at all."""
    place = directory / "evals"
    place.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    content = finite({**asdict(found), "tasks": list(found.tasks), "at": at, "mean": found.mean})
    temporary = place / f".new.{os.getpid()}"
    atomic_write.write_json(temporary, content)
    try:
        for number in range(1, 10_000):
            path = place / f"step-{found.version:06d}{f'-{number}' if number > 1 else ''}.json"
            try:
                os.link(temporary, path)  # unlike a rename, this fails if the file exists
            except FileExistsError:
                continue
            return path
    finally:
        temporary.unlink(missing_ok=True)
    raise FileExistsError(f"{place}: ten thousand evaluations of version {found.version}")


def read_evals(directory: Path) -> list[StoredEval]:
    """Return all evaluations by version, then in the order of writing. Unreadable files are skipped."""
    found: list[tuple[str, StoredEval]] = []
    for path in (directory / "evals").glob("step-*.json"):
        try:
            raw = read_json(path)
            raw.pop("mean", None)
            each = StoredEval(**raw)
            if each.scores and len(each.scores) == len(each.tasks) and all(_is_number(score) for score in each.scores):
                found.append((path.name, each))
        except (ValueError, TypeError, AttributeError, OSError):
            continue
    return [each for _, each in sorted(found, key=lambda item: (item[1].version, len(item[0]), item[0]))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
