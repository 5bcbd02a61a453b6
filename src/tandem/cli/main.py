"""The command line: a thin layer over functions that Python has too. Heavy imports stand inside the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tandem.cli.artifacts import artifacts_app
from tandem.cli.atropos import atropos
from tandem.cli.engine import engine_app
from tandem.cli.online import online_app
from tandem.cli.options import AsJson, Host, Insecure, Overrides, Port, ReadyFile, Thinking
from tandem.cli.sync import sync_app
from tandem.errors import TandemError

app = typer.Typer(
    name="tandem",
    help="Post-train language models while they serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
spec_app = typer.Typer(help="What a spec may hold.", no_args_is_help=True)
env_app = typer.Typer(help="Environments: where tasks and rewards come from.", no_args_is_help=True)
app.add_typer(spec_app, name="spec")
app.add_typer(env_app, name="env")
app.add_typer(sync_app, name="sync")
app.add_typer(online_app, name="online")
app.add_typer(engine_app, name="engine")
rollouts_app = typer.Typer(help="Groups from many environments to one trainer, over HTTP.", no_args_is_help=True)
app.add_typer(rollouts_app, name="rollouts")
gateway_app = typer.Typer(help="Any agent's conversations, recorded token by token.", no_args_is_help=True)
app.add_typer(gateway_app, name="gateway")
app.add_typer(artifacts_app, name="artifacts")
app.command()(atropos)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file, as in examples/quickstart.toml.")]
Supervise = Annotated[
    bool,
    typer.Option("--supervise", help="In a process of its own, that is started again when what ended it may pass."),
]
Source = Annotated[str, typer.Argument(metavar="DIR", help="A run directory, a model directory, or a hub id.")]


@app.command()
def train(
    spec: SpecFile,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives; default runs/<name>-<time>.")] = None,
    supervise: Supervise = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Before: the largest micro-batches and a sync, against the plan.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Train a model as SPEC says; watch it live; get a verdict."""
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ())  # before anything heavy: a wrong spec is refused at once
    if supervise and rehearse:
        raise typer.BadParameter("--rehearse goes without --supervise: rehearse once, then start the supervised run")
    if supervise:
        from tandem.runs.run import Run
        from tandem.runs.supervise import supervise_run

        directory = run_dir or Run.new_directory(Path("runs"), checked.name)
        raise typer.Exit(supervise_run(directory, spec, overrides or ()))
    from tandem.recipes import run
    from tandem.runs.failure_diagnosis import exits_by_class

    with exits_by_class():
        run(checked, run_dir, rehearse=rehearse)


@app.command()
def plan(
    spec: SpecFile,
    gpu: Annotated[str, typer.Option(help="h200, h100 or cpu. Default: cpu if `device` says so, else h200.")] = "",
    memory_gib: Annotated[float, typer.Option(min=0, help="Of the very card; 0 takes what its kind has.")] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Of an environment's prompts; 0 assumes 64.")] = 0,
    row_tokens: Annotated[
        int, typer.Option(min=0, help="Of every recorded example; 0 assumes data.max_tokens, or 2,048.")
    ] = 0,
    answer_tokens: Annotated[
        float, typer.Option(min=0, help="Of an answer, on average; 0 assumes 70 % of train.max_tokens.")
    ] = 0.0,
    prices: Annotated[Path | None, typer.Option(help="Dollars an hour, a TOML file: h200 = 3.5")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what SPEC will take: memory by phase, time, cost, and what to change. Exit code 1: it does not fit."""
    from tandem.recipes.plan_run import plan_run
    from tandem.runs.planner.plan_text import plan_text
    from tandem.spec.load import load_spec

    planned = plan_run(
        load_spec(spec, overrides or ()),
        gpu=gpu,
        prices=prices,
        memory_gib=memory_gib,
        prompt_tokens=prompt_tokens,
        row_tokens=row_tokens,
        answer_tokens=answer_tokens,
    )
    typer.echo(json.dumps(planned.as_json(), indent=2) if as_json else plan_text(planned))
    if not planned.fits:
        raise typer.Exit(1)


@app.command()
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Where runs are to be.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say what this machine can run, what is missing, and the next step for each lack. Exit code 1: nothing runs."""
    from tandem.runs.doctor import diagnose, health_text

    health = diagnose(directory)
    typer.echo(json.dumps(health.as_json(), indent=2) if as_json else health_text(health))
    if not health.able:
        raise typer.Exit(1)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run that was killed, stopped or failed.")],
    take_over: Annotated[
        bool, typer.Option("--take-over", help="From a process that holds the run and cannot be ended.")
    ] = False,
    supervise: Supervise = False,
) -> None:
    """Go on with a run from its last checkpoint; one that succeeded is left as it is."""
    if supervise:
        from tandem.runs.supervise import supervise_run

        if take_over:
            raise typer.BadParameter("--take-over is for once, --supervise for every time: take it over first")
        raise typer.Exit(supervise_run(run_dir))
    from tandem.recipes import resume
    from tandem.runs.failure_diagnosis import exits_by_class

    with exits_by_class():
        resume(run_dir, take_over=take_over)


@app.command()
def digest(run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run that succeeded.")]) -> None:
    """Print the hashes of a run's final weights, optimizer and loss log."""
    from tandem.runs.run_ending import digest_run

    for what, found in digest_run(run_dir).items():
        typer.echo(f"{what} {found}")


@app.command()
def sweep(
    spec: SpecFile,
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="The seeds, with commas: --seeds 0,1,2")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the runs live; name it again to go on after a failure.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train SPEC once for each seed; say what all of them show."""
    from tandem.spec.load import load_spec, parse_seeds

    numbers = parse_seeds(seeds)
    checked = load_spec(spec, overrides or ())
    from tandem.recipes.sweep import sweep

    if sweep(checked, numbers, directory).failed:
        raise typer.Exit(1)


@app.command()
def serve(
    source: Source,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keeps the token. Default: serve/ in a run, else .tandem/serve.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    thinking: Thinking = False,
) -> None:
    """Answer OpenAI requests: /v1/models, /v1/chat/completions, /v1/completions."""
    from tandem.recipes.serve import default_data_dir, serve_model
    from tandem.serve.http.run import Listen

    listen = Listen(data_dir or default_data_dir(source), host, port, ready_file, insecure)
    serve_model(source, listen, thinking=thinking)


@app.command()
def chat(
    source: Source,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    thinking: Thinking = False,
) -> None:
    """Talk to a model in the terminal."""
    from tandem.recipes.serve import chat_with

    chat_with(source, temperature=temperature, max_tokens=max_tokens, system=system, thinking=thinking)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, finished or not.")]) -> None:
    """Write report.html and curves.png of a run anew."""
    from tandem.obs.report import write_report

    typer.echo(write_report(run_dir))


@app.command("eval")
def evaluate(
    source: Source,
    spec: Annotated[Path | None, typer.Option(help="Says what is played. Default: the run's own.")] = None,
    base: Annotated[str, typer.Option(help="A run, a model or a hub id to compare with, task by task.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where the result goes. Default: evals/ of the run.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Play held-out tasks with a model, outside of a run; with something to compare, a verdict."""
    from tandem.recipes.evaluation import evaluate_model
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ()) if spec else None
    judged = evaluate_model(source, checked, base=base, directory=out)
    typer.echo(json.dumps(judged.row(), indent=2) if as_json else judged.text())


@app.command()
def export(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run directory that ended well, or an online server's data directory."),
    ],
    merge: Annotated[bool, typer.Option("--merge", help="The whole model, where adapters were trained.")] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="As it was after this step, of a run in any state: one that was saved.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="Of an online server: a number, anchor-N or current. Default: current.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where it goes. Default: deploy/ in the run, export/ in the data directory.")
    ] = None,
    push: Annotated[str, typer.Option(metavar="REPO", help="Also to the Hugging Face hub, as user/name.")] = "",
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
) -> None:
    """Make a deployable copy of what a run made, or an online server learned, with a model card."""
    from tandem.recipes.export import export_run

    copy = export_run(run_dir, merge=merge, step=step, version=version, directory=out, push=push, public=public)
    typer.echo(copy)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories, two or more.")],
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the interval.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: specs, evaluations in pairs, curves, time, memory; all against the first."""
    from tandem.runs.compare import compare_json, compare_runs, compare_text

    found = compare_runs(runs, confidence=confidence)
    typer.echo(json.dumps(compare_json(found), indent=2) if as_json else compare_text(found))


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Look once, instead of following it to its end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run from another terminal: stage, step, numbers, events, whether it moves. Exit code 1: it failed."""
    from tandem.runs.watch import watch_run

    if watch_run(run_dir, once=once, as_json=as_json, tell=typer.echo) == "failed":
        raise typer.Exit(1)


@spec_app.command("schema")
def spec_schema() -> None:
    """Print the JSON Schema of a spec."""
    from tandem.spec.load import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@spec_app.command("show")
def spec_show(spec: SpecFile, overrides: Overrides = None) -> None:
    """Check SPEC and print it whole, defaults included."""
    from tandem.spec.load import load_spec, to_toml

    typer.echo(to_toml(load_spec(spec, overrides or ())), nl=False)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="A Python name, such as my_env.")],
    directory: Annotated[Path, typer.Option(help="Where to write NAME.py and NAME.toml.")] = Path("."),
) -> None:
    """Write an environment that trains, and the spec that trains it."""
    from tandem.env.scaffold import new_environment

    for path in new_environment(name, directory):
        typer.echo(path)


@env_app.command("try")
def env_try(
    name: Annotated[str, typer.Argument(help="arithmetic, sort, guess, package.module:Class, or a file.")],
    params: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the environment.")
    ] = None,
    split: Annotated[Literal["train", "eval"], typer.Option(help="Of which tasks.")] = "eval",
    index: Annotated[int, typer.Option(min=0, help="Which task.")] = 0,
) -> None:
    """Play one episode in the terminal: you are the model."""
    from tandem.env.human_player import try_environment
    from tandem.spec.load import parse_overrides

    try_environment(name, parse_overrides(params or ()), split=split, index=index)


@env_app.command("serve")
def env_serve(
    name: Annotated[str, typer.Argument(help="arithmetic, sort, guess, package.module:Class, or a file.")],
    rollouts: Annotated[str, typer.Option(help="URL of the rollout service.")],
    token_file: Annotated[Path, typer.Option(help="Holds the service's token.")],
    engine: Annotated[str, typer.Option(help="URL of an engine, as `tandem engine serve` tells it.")],
    engine_token_file: Annotated[Path, typer.Option(help="Holds the engine's token.")],
    model: Annotated[str, typer.Option(help="Tokenizer and chat template of the engine's model: directory or hub id.")],
    params: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the environment.")
    ] = None,
    judge: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="kind=engine; or kind=http, url, model, key_env.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Episodes at once, each in its own process; 0: in this one.")] = 0,
    groups: Annotated[int, typer.Option(min=1, help="Groups under way at most.")] = 16,
    group_size: Annotated[int, typer.Option(min=1, help="Siblings of a group.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one turn.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="The trainer must know it.")] = 1.0,
    episode_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds; waits for the engine do not count.")] = 60.0,
    weight: Annotated[float, typer.Option(min=0, help="Its part of what is trained on, beside others.")] = 1.0,
    min_share: Annotated[float, typer.Option(min=0, max=1, help="At least this part, whatever the weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of tasks and tokens; another one for every copy that plays.")] = 0,
    thinking: Thinking = False,
) -> None:
    """Play an environment for a rollout service, with an engine that somebody keeps in step with the trainer."""
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
    )


@gateway_app.command("serve")
def gateway_serve(
    model: Annotated[
        str,
        typer.Option(help="A model or run directory, or a hub id; with --engine-url its tokenizer alone."),
    ],
    engine_url: Annotated[str, typer.Option(help="An engine that is served already. Default: one in here.")] = "",
    engine_token_file: Annotated[Path | None, typer.Option(help="The file that holds that engine's token.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keeps the token and the sessions. Default: .tandem/gateway.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    thinking: Thinking = False,
    trajectories: Annotated[
        Path | None, typer.Option(help="Where rewarded groups go as JSON Lines. Default: trajectories/ in --data-dir.")
    ] = None,
    idle_s: Annotated[float, typer.Option(min=1, help="A session that is not asked for so long is forgotten.")] = 3600,
    rollouts: Annotated[str, typer.Option(help="A rollout service that rewarded groups go to, instead of files.")] = "",
    rollouts_token_file: Annotated[Path | None, typer.Option(help="The file that holds its token.")] = None,
) -> None:
    """Give any agent an OpenAI endpoint that records what it does as trajectories, and takes rewards."""
    from tandem.recipes.gateway import serve_gateway
    from tandem.serve.http.run import Listen

    listen = Listen(data_dir or Path(".tandem") / "gateway", host, port, ready_file, insecure)
    serve_gateway(
        model,
        listen,
        engine_url=engine_url,
        engine_token_file=engine_token_file,
        thinking=thinking,
        trajectories=trajectories,
        idle_s=idle_s,
        rollouts=rollouts,
        rollouts_token_file=rollouts_token_file,
    )


@rollouts_app.command("serve")
def rollouts_serve(
    data_dir: Annotated[
        Path, typer.Option(help="Keeps the queue, what was promised, and the token. One server owns it.")
    ] = Path(".tandem") / "rollouts",
    host: Host = "127.0.0.1",
    port: Port = 8200,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    atropos: Annotated[bool, typer.Option("--atropos", help="Also the endpoints of Atropos, for its clients.")] = False,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Atropos' endpoints ask for no token; on loopback only.")
    ] = False,
    gateway: Annotated[
        str, typer.Option(help="URL of the gateway that Atropos's environments sample from: it knows versions.")
    ] = "",
    gateway_token_file: Annotated[Path | None, typer.Option(help="The file that holds its token.")] = None,
) -> None:
    """Take scored groups from environments and hand out batches: durable, each trained on once."""
    from tandem.recipes.rollout_service import serve_rollouts
    from tandem.serve.http.run import Listen

    listen = Listen(data_dir, host, port, ready_file, insecure)
    serve_rollouts(
        listen,
        atropos=atropos,
        insecure_no_auth=insecure_no_auth,
        gateway=gateway,
        gateway_token_file=gateway_token_file,
    )


@rollouts_app.command("top")
def rollouts_top(
    source: Annotated[
        str,
        typer.Argument(metavar="URL|DATA_DIR", help="A rollout service's URL, its data directory, or its ready file."),
    ],
    token_file: Annotated[Path | None, typer.Option(help="With a URL: the file that holds its token.")] = None,
    once: Annotated[bool, typer.Option("--once", help="One frame, and no more.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds from one look to the next.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Watch a rollout service: its queue, how old groups are, rates, environments, what is dropped and refused."""
    from tandem.obs.rollouts_status import rollouts_status

    if not (once or as_json):
        from tandem.obs.rollouts_top import watch_rollouts

        return watch_rollouts(source, token_file=token_file, every_s=every)
    told = rollouts_status(source, token_file=token_file)
    if as_json:
        return typer.echo(json.dumps(told, indent=2))
    from tandem.obs.rollouts_top import print_frame

    print_frame(told)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        _never_fail_on_a_character(stream)
    try:
        app()
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        from tandem.io.extras import explain_missing
        from tandem.runs.failure_diagnosis import interrupted, told_by_the_system

        if interrupted(error):
            sys.exit(130)
        if not (said := told_by_the_system(error) or explain_missing(error)):
            raise
        print(f"tandem: {said}", file=sys.stderr)
        sys.exit(2)


def _never_fail_on_a_character(stream: Any) -> None:
    """A terminal that knows ASCII only shows a `?` for a curve's blocks; it does not end the run."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
