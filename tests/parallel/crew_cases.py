"""`python crew_cases.py HOME`: do what HOME/stages.json says. Each stage is a number of ranks and work for them.

All work of a stage shares one crew: a crew's start is ten seconds of imports, and a training is one or two. One process
is rank 0 of all stages. A stage of one rank has no crew: each of its trainings is what `tandem train` runs.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from tandem import recipes
from tandem.obs.live_view import LiveView
from tandem.recipes.crew import crew_of
from tandem.spec.load import parse_spec, to_toml
from tandem.types import Trajectory


def do_stages(home: Path, stages: Sequence[dict[str, Any]]) -> None:
    """Start this program in a process of its own, and wait until it has ended."""
    (home / "stages.json").write_text(json.dumps(stages))
    command = [sys.executable, __file__, str(home)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]


def main(home: Path) -> None:
    recipes.write_report = no_report  # pyright: ignore[reportAttributeAccessIssue]
    for number, stage in enumerate(json.loads((home / "stages.json").read_text())):
        place = home / f"stage-{number}"
        place.mkdir()
        first = parse_spec({**stage["work"][0]["spec"], "parallel": parallel(stage["ranks"])})
        (place / "spec.toml").write_text(to_toml(first))  # the other ranks read it
        with crew_of(first, place) as crew:
            recipes.crew_of = shared(crew)  # pyright: ignore[reportAttributeAccessIssue]
            for work in stage["work"]:
                do(home, stage["ranks"], work, crew)
        if crew is not None:
            dist.destroy_process_group()


def no_report(_: Path) -> None:
    """A report takes half a second, and no test of these runs looks at it."""


def shared(crew: Any) -> Any:
    """Return what replaces `crew_of`: the crew that is there begins again with another spec."""

    @contextmanager
    def crew_of_stage(spec: Any, directory: Path) -> Iterator[Any]:
        if crew is not None:
            crew.order("begin", spec=spec.model_dump(mode="json", exclude_none=True))
        yield crew

    return crew_of_stage


def do(home: Path, ranks: int, work: dict[str, Any], crew: Any) -> None:
    """Train `spec`, in `to`; or resume a copy of the run `of`, as if it had been killed after the checkpoint of step
    `after`."""
    to, view = home / work["to"], LiveView("run", Console(file=io.StringIO(), width=120))
    if "of" in work:
        shutil.copytree(home / work["of"], to)
        cut(to, work["after"])
        recipes.resume(to, ranks=ranks, view=view)
        return
    spec = parse_spec({**work["spec"], "parallel": parallel(ranks, work.get("hosts", 1), work.get("sums", "round"))})
    if spec.recipe == "rl":
        with shared(crew)(spec, to):
            on_groups(spec, crew, to)
    else:
        recipes.run(spec, to, view=view)


def parallel(ranks: int, hosts: int = 1, sums: str = "round") -> dict[str, Any]:
    gather = "step" if (ranks, hosts) in ((2, 1), (4, 2)) else "layer"
    return {"ranks": ranks, "hosts": hosts, "shares": 4, "gather": gather, "sums": sums, "deadline_s": 60.0}


def cut(run: Path, after: int) -> None:
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > after:
            shutil.rmtree(checkpoint)
    shutil.rmtree(run / "export")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))


def on_groups(spec: Any, crew: Any, directory: Path) -> None:
    """Train on recorded groups, as the loop of an RL run does with groups that were sampled."""
    from tandem.build import built_model, training
    from tandem.build.reference import set_reference

    directory.mkdir(parents=True)
    model = built_model.run_model(spec, crew)
    algorithm = training.algorithm(spec.algorithm, spec.train.max_tokens)
    set_reference(spec.algorithm, model, spec.precision)
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
    main(Path(sys.argv[1]))
