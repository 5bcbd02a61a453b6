"""`tandem env`: create, try, check and serve environments, and their packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli import packages
from tandem.cli.options import AsJson, Thinking, echo

Params = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one parameter of the environment. Repeatable."),
]
env_app = typer.Typer(help="Create, try and serve environments: the source of tasks and rewards.", no_args_is_help=True)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="Name of the environment: a Python identifier such as my_env.")],
    directory: Annotated[Path, typer.Option(help="Directory for NAME.py and NAME.toml.")] = Path("."),
) -> None:
    """Create a working environment and a spec that trains on it."""
    from tandem.env.scaffold import new_environment

    for path in new_environment(name, directory):
        echo(path)


@env_app.command("try")
def env_try(
    name: Annotated[str, typer.Argument(help="A spec, arithmetic, sort, package.module:Class, or a file path.")],
    params: Params = None,
    split: Annotated[Literal["train", "eval"], typer.Option(help="Which tasks to take.")] = "eval",
    index: Annotated[int, typer.Option(min=0, help="Number of the task within the split.")] = 0,
) -> None:
    """Play one episode in the terminal: you write the model's answers."""
    from tandem.env.human_player import try_environment
    from tandem.spec.load import parse_overrides

    try_environment(name, parse_overrides(params or ()), split=split, index=index, tell=echo)


@env_app.command("serve")
def env_serve(
    name: Annotated[str, typer.Argument(help="arithmetic, sort, guess, package.module:Class, or a file path.")],
    rollouts: Annotated[str, typer.Option(help="URL of the rollout service.")],
    token_file: Annotated[Path, typer.Option(help="File with the rollout service's token.")],
    engine: Annotated[str, typer.Option(help="URL of an engine, as `tandem engine serve` prints it.")],
    engine_token_file: Annotated[Path, typer.Option(help="File with the engine's token.")],
    model: Annotated[str, typer.Option(help="Directory or hub id of the engine's model, for its tokenizer.")],
    params: Params = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Judge: kind=engine, or kind=http with url, model, key_env. Default: none."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes, one episode each; 0 plays all episodes in this process.")
    ] = 0,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Play in bubblewrap, without network and other files; needs workers.")
    ] = False,
    sandbox_network: Annotated[bool, typer.Option("--sandbox-network", help="Open the network to it.")] = False,
    sandbox_read: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Open it to be read.")] = None,
    sandbox_write: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Open it to be written.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Most groups in flight.")] = 16,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes per group.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one turn.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Same as the trainer's.")] = 1.0,
    episode_timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest episode in seconds, without its waits for the engine.")
    ] = 60.0,
    weight: Annotated[float, typer.Option(min=0, help="Weight of this environment among all others.")] = 1.0,
    min_share: Annotated[
        float, typer.Option(min=0, max=1, help="Smallest share of the training groups, whatever the weights.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling; give each copy its own.")] = 0,
    thinking: Thinking = False,
) -> None:
    """Play an environment for a rollout service, on an engine whose weights the trainer updates."""
    from tandem.recipes.environment_client import serve_environment
    from tandem.spec.load import parse_judge, parse_overrides
    from tandem.types import Sampling

    serve_environment(
        name,
        parse_overrides(params or ()),
        rollouts=rollouts,
        token_file=token_file,
        engine=engine,
        engine_token_file=engine_token_file,
        model=model,
        group_size=group_size,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
        thinking=thinking,
        workers=workers,
        most_groups=groups,
        weight=weight,
        min_share=min_share,
        seed=seed,
        episode_timeout_s=episode_timeout,
        judge=parse_judge(judge or ()),
        sandbox=sandbox,
        sandbox_network=sandbox_network,
        sandbox_read=sandbox_read or (),
        sandbox_write=sandbox_write or (),
    )


@env_app.command("check")
def env_check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|ENV", help="TOML file of an RL run, or arithmetic, sort, guess, package.module:Class, a file."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model directory, run or hub id. Default: the spec's. Where there is none, or one that is made from "
            "scratch, demonstrations are played instead."
        ),
    ] = "",
    tasks: Annotated[int, typer.Option(min=2, help="Training tasks to play.")] = 32,
    answers: Annotated[int, typer.Option(min=2, help="Answers to each task.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of an answer; 0: the spec's, or 256.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: the spec's, or 1.")] = 0.0,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field of SPEC, or a parameter of ENV. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how often a model earns a reward before it is trained. Without a model: check splits and demonstrations.
    Exit code 1: there is too little to learn from."""
    from tandem.spec.load import load_spec, parse_overrides
    from tandem.spec.model import PathModel
    from tandem.spec.run import RlSpec

    is_spec = source.endswith(".toml")
    checked = load_spec(source, setting or ()) if is_spec else source  # a wrong spec is refused before torch comes
    params = None if is_spec else parse_overrides(setting or ())
    if not model and not (isinstance(checked, RlSpec) and isinstance(checked.model, PathModel)):
        from tandem.recipes.demonstration_check import check_demonstrations

        shown = check_demonstrations(checked, params=params)
        echo(json.dumps(shown.row()) if as_json else shown.text())
        if not shown.passed:
            raise typer.Exit(1)
        return
    from tandem.recipes.base_rate import measure_base_rate

    found = measure_base_rate(
        checked, model, params=params, tasks=tasks, group_size=answers, max_tokens=max_tokens, temperature=temperature
    )
    echo(json.dumps(found.row()) if as_json else found.text())
    if not found.passed:
        raise typer.Exit(1)


env_app.command("list")(packages.env_list)
for command in (packages.push, packages.yank, packages.verify):
    env_app.command()(command)
