"""`python crew_cases.py DIRECTORY RANKS HOSTS [CASE ...]`: train cases of DIRECTORY/cases.json on so many ranks, as if
they were on so many hosts; all cases if none is named.

All cases of a number of ranks share one crew: a crew's start is ten seconds of imports, and a case's training is one.
With one rank there is no crew, and each case is what `tandem train` runs.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem import recipes
from tandem.obs.live_view import LiveView
from tandem.recipes.crew import crew_of
from tandem.spec.load import parse_spec, to_toml
from tandem.types import Trajectory


def train_all(home: Path, ranks: int, hosts: int, names: list[str]) -> None:
    cases = json.loads((home / "cases.json").read_text())
    specs = {name: parse_spec(with_ranks(cases[name], ranks, hosts)) for name in names or cases}
    place = home / f"ranks-{ranks}-hosts-{hosts}"
    place.mkdir()
    (place / "spec.toml").write_text(to_toml(next(iter(specs.values()))))
    with crew_of(next(iter(specs.values())), place) as crew:

        @contextmanager
        def shared(spec: Any, directory: Path) -> Iterator[Any]:
            if crew is not None:
                crew.order("begin", spec=spec.model_dump(mode="json", exclude_none=True))
            yield crew

        recipes.crew_of = shared  # pyright: ignore[reportAttributeAccessIssue]
        for name, spec in specs.items():
            if spec.recipe == "rl":
                with shared(spec, place):
                    on_groups(spec, crew, place / name)
            else:
                recipes.run(spec, place / name, view=LiveView("run", Console(file=io.StringIO(), width=120)))


def with_ranks(case: dict[str, Any], ranks: int, hosts: int) -> dict[str, Any]:
    return {**case, "parallel": {"ranks": ranks, "hosts": hosts, "shares": 4, "deadline_s": 60.0}}


def on_groups(spec: Any, crew: Any, directory: Path) -> None:
    """Train on recorded groups, as the loop of an RL run does with groups that were sampled."""
    from tandem.build import training

    directory.mkdir()
    model = training.run_model(spec, crew)
    algorithm = training.algorithm(spec.algorithm, spec.train.max_tokens)
    training.reference(spec.algorithm, model, spec.precision)
    trainer = training.trainer(spec.train, model, algorithm, 0, spec.seed)
    make = training.batches(spec.train, model, algorithm)
    rng = random.Random(5)
    with (directory / "metrics.jsonl").open("w") as rows:
        for _ in range(spec.train.steps):
            groups = [recorded_group(rng, spec.train.group_size, trainer.version) for _ in range(4)]
            rows.write(json.dumps(trainer.step(make(groups, trainer.version))) + "\n")
            trainer.export("live")
    trainer.save(directory / "saved")
    training.export(model, directory / "export")


def recorded_group(rng: random.Random, size: int, version: int) -> list[Trajectory]:
    """Siblings of different lengths; their tokens were sampled by the version before."""
    prompt = [rng.randrange(2, 250) for _ in range(rng.randrange(3, 9))]
    group: list[Trajectory] = []
    for _ in range(size):
        answer = [rng.randrange(2, 250) for _ in range(rng.randrange(2, 30))]
        ids = prompt + answer
        trained = [False] * len(prompt) + [True] * len(answer)
        logprobs = [0.0] * len(prompt) + [-rng.uniform(4.0, 7.0) for _ in answer]
        versions = [-1] * len(prompt) + [version - 1 if version else -2] * len(answer)
        group.append(Trajectory(ids, trained, logprobs, versions, reward=float(rng.random() < 0.5)))
    return group


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
