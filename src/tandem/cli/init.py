"""`tandem init`: a first spec from four answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.options import echo


def init(
    goal: Annotated[str, typer.Option(help="rewards (RL), imitate (SFT) or prefer (DPO). Default: ask.")] = "",
    model: Annotated[
        str, typer.Option(help="Model directory, hub id, or a preset from scratch such as tiny. Default: ask.")
    ] = "",
    task: Annotated[
        str, typer.Option(help="A file of rows; with rewards an environment, otherwise a data set, too. Default: ask.")
    ] = "",
    gpu: Annotated[
        str, typer.Option(help="none, GiB of memory such as 24, or a card such as 4090. Default: ask.")
    ] = "",
    billions: Annotated[
        float, typer.Option(min=0.0, help="Billions of parameters; 0: by the model's files or name.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="File to write; it must not exist.")] = Path("first.toml"),
) -> None:
    """Write a first spec: asks for goal, model, task and GPU, or takes them as options."""
    from tandem.errors import SpecError
    from tandem.runs.first_spec import FirstAnswers, choices, questions, write_first_spec
    from tandem.runs.planner.calibration import cards

    given: dict[str, Any] = {"goal": goal, "model": model, "task": task, "gpu": gpu}
    for field, question, default in questions():
        if given[field]:
            continue
        if not sys.stdin.isatty():
            raise SpecError(f"--{field}: is missing, and there is no terminal to ask in; {question}")
        while not given[field]:
            told, known = typer.prompt(question, default=default), choices(field)
            if known and told not in known:
                echo(f"'{told}': choose {', '.join(known)}", err=True)
            else:
                given[field] = told
    vllm = (Path(".tandem") / "vllm" / "bin" / "python").exists()
    path = write_first_spec(FirstAnswers(**given, billions=billions, vllm=vllm), out)
    echo(f"wrote {path}\nNext:")
    card = "cpu" if given["gpu"] == "none" else given["gpu"]
    kind = f" --gpu {card}" if card in {*cards(), "cpu"} else f" --memory-gib {card}"
    echo(f"  tandem plan {path}{kind}    what it needs")
    if given["goal"] == "rewards" and "preset" not in path.read_text(encoding="utf-8"):
        echo(f"  tandem env check {path}    how often the model is right before it is trained")
    echo(f"  tandem train {path}")
