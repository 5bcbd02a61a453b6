"""The `tandem` command: each sub-command calls one function of the Python API. Heavy imports are inside the
functions."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tandem.cli.agent import agent
from tandem.cli.artifacts import artifacts_app
from tandem.cli.atropos import atropos
from tandem.cli.control import control_app
from tandem.cli.dashboard import dashboard
from tandem.cli.deployments import deploy, deployments, promote, rollback, undeploy
from tandem.cli.engine import engine_app
from tandem.cli.environments import env_app
from tandem.cli.feedback import feedback_command
from tandem.cli.init import init
from tandem.cli.mcp import mcp
from tandem.cli.model import model_app
from tandem.cli.online import online_app
from tandem.cli.options import (
    AsJson,
    EngineTable,
    Host,
    Insecure,
    Overrides,
    Port,
    Quiet,
    ReadyFile,
    SpecOrNone,
    Thinking,
    Version,
    checked_spec,
    echo,
    view_of,
)
from tandem.cli.others import CommandsWithOthers, SpecCommand
from tandem.cli.remote import cancel, login, logs, pull, resume_remote, submit
from tandem.cli.rollouts import rollouts_app
from tandem.cli.runs import compare, explain, report, runs, watch
from tandem.cli.samples import samples
from tandem.cli.sweep import sweep
from tandem.cli.sync import sync_app
from tandem.cli.targets import targets
from tandem.cli.top import top
from tandem.errors import TandemError
from tandem.runs.named_runs import is_run_id

app = typer.Typer(
    name="tandem",
    cls=CommandsWithOthers,
    help="Train a language model further, and bring each version to the engine that serves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
spec_app = typer.Typer(help="Check a spec, and list every field that a spec may have.", no_args_is_help=True)
app.add_typer(spec_app, name="spec")
app.add_typer(env_app, name="env")
app.add_typer(sync_app, name="sync")
app.add_typer(online_app, name="online")
app.add_typer(engine_app, name="engine")
app.add_typer(model_app, name="model")
app.add_typer(rollouts_app, name="rollouts")
gateway_app = typer.Typer(help="Record any agent's conversations, token by token, for training.", no_args_is_help=True)
app.add_typer(gateway_app, name="gateway")
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(control_app, name="control")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file, as in examples/quickstart.toml.")]
Supervise = Annotated[
    bool, typer.Option("--supervise", help="Run in a child process and restart it after transient failures.")
]
Source = Annotated[str, typer.Argument(metavar="DIR", help="Run directory, model directory or hub id.")]


@app.callback()
def options(version: Version = False) -> None:
    """Each sub-command has options of its own."""


@app.command(cls=SpecCommand)
def train(
    spec: SpecOrNone = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory to create. Default: runs/<name>-<time>.")] = None,
    supervise: Supervise = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="First try the largest micro-batches and a sync; compare with the plan.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Resume the run in --run-dir if there is one; otherwise start it there.")
    ] = False,
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model as SPEC says, with a live view, and end with a verdict: improved, worse, unchanged or undecided."""
    checked = checked_spec(spec, overrides)  # before heavy imports: a wrong spec is refused at once
    view = view_of(quiet=quiet, as_json=as_json)
    if supervise and view is not None:
        raise typer.BadParameter("--supervise cannot be combined with --quiet or --json: its child prints the view")
    if supervise and rehearse:
        raise typer.BadParameter(
            "--rehearse and --supervise cannot be combined: rehearse first, then start the supervised run"
        )
    if supervise:
        if spec is None:
            raise typer.BadParameter("--supervise: needs SPEC, a file, since it starts the run again by it")
        from tandem.runs.run import Run
        from tandem.runs.supervise import supervise_run

        directory = run_dir or Run.new_directory(Path("runs"), checked.name)
        raise typer.Exit(supervise_run(directory, spec, overrides or ()))
    if go_on and run_dir is None:
        raise typer.BadParameter("--go-on: needs --run-dir, the directory of the run")
    from tandem.recipes import resume, run
    from tandem.recipes.crew import as_launched, end_follower, follow, is_follower, launched
    from tandem.runs.failure_diagnosis import exits_by_class

    with exits_by_class(), launched():
        checked = as_launched(checked)
        if is_follower():
            follow(checked, run_dir)
            end_follower()
        if go_on and run_dir is not None and (run_dir / "spec.toml").exists():
            status = resume(run_dir, ranks=checked.parallel.ranks, hosts=checked.parallel.hosts, view=view)
            directory = run_dir
        else:
            done = run(checked, run_dir, rehearse=rehearse, view=view)
            directory, status = done.directory, done.status
    if as_json:
        echo(json.dumps({"run": str(directory), **status}, indent=2))


@app.command(cls=SpecCommand)
def plan(
    spec: SpecOrNone = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            "--card",
            help="Card to plan for: 3090, 4090, 5090, l4, l40s, a100-40, a100-80, h100, h200, b200, or cpu. Default: "
            "this machine's; without a GPU, what the spec says, or h200.",
        ),
    ] = "",
    memory_gib: Annotated[
        float, typer.Option(min=0, help="GPU memory in GiB; 0 uses the default for this GPU type.")
    ] = 0.0,
    prompt_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per prompt; 0 measures the environment's prompts, or uses 64.")
    ] = 0,
    row_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens per training example; 0 measures the data, or uses data.max_tokens or 2,048."),
    ] = 0,
    answer_tokens: Annotated[
        float, typer.Option(min=0, help="Mean tokens per answer; 0 uses 70 % of train.max_tokens.")
    ] = 0.0,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with prices in dollars per GPU hour: h200 = 3.5. Default: guesses, in prices.toml."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory by phase, time and cost of SPEC, and suggest changes. Exit code 1: it does not fit."""
    from tandem.recipes.plan_run import plan_run
    from tandem.runs.planner.plan_text import plan_text

    planned = plan_run(
        checked_spec(spec, overrides),
        gpu=gpu,
        prices=prices,
        memory_gib=memory_gib,
        prompt_tokens=prompt_tokens,
        row_tokens=row_tokens,
        answer_tokens=answer_tokens,
    )
    echo(json.dumps(planned.as_json(), indent=2) if as_json else plan_text(planned))
    if not planned.fits:
        raise typer.Exit(1)


@app.command()
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Directory for runs, to check its disk.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check this machine: what can run, what is missing and how to install it. Exit code 1: nothing can run."""
    from tandem.runs.doctor import diagnose, health_text

    health = diagnose(directory)
    echo(json.dumps(health.as_json(), indent=2) if as_json else health_text(health))
    if not health.able:
        raise typer.Exit(1)


@app.command()
def resume(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory, or id on a control server, of a run that did not succeed.")
    ],
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run from a process that still holds it and cannot be ended.")
    ] = False,
    supervise: Supervise = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="parallel.ranks=N", help="Resume on N ranks; the result has the same bytes."),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(min=0, help="US dollars that a run on a control server may cost in all. Default: as before."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run from its last checkpoint. A run that succeeded is left unchanged."""
    if is_run_id(str(run_dir)):
        if take_over or supervise or overrides or quiet:
            raise typer.BadParameter("--take-over, --supervise, --set and --quiet are for run directories, not for ids")
        return resume_remote(str(run_dir), max_cost, as_json=as_json)
    if max_cost is not None:
        raise typer.BadParameter("--max-cost is for the id of a run on a control server")
    ranks, view = _ranks_of(overrides or ()), view_of(quiet=quiet, as_json=as_json)
    if supervise and view is not None:
        raise typer.BadParameter("--supervise cannot be combined with --quiet or --json: its child prints the view")
    if supervise:
        from tandem.runs.supervise import supervise_run

        if take_over:
            raise typer.BadParameter(
                "--take-over and --supervise cannot be combined: take the run over first, then supervise it"
            )
        if ranks:
            raise typer.BadParameter("--set and --supervise cannot be combined: resume once with --set, then supervise")
        raise typer.Exit(supervise_run(run_dir))
    from tandem.recipes import resume
    from tandem.runs.failure_diagnosis import exits_by_class

    with exits_by_class():
        status = resume(run_dir, take_over=take_over, ranks=ranks, view=view)
    if as_json:
        echo(json.dumps({"run": str(run_dir), **status}, indent=2))


def _ranks_of(overrides: Sequence[str]) -> int:
    """Return the number of ranks from the overrides; 0 if they set none. No other field of a resumed run may change."""
    from tandem.spec.load import parse_overrides

    told = parse_overrides(overrides)
    ranks = told.get("parallel", {}).pop("ranks", 0)
    if told not in ({}, {"parallel": {}}) or not isinstance(ranks, int):
        raise typer.BadParameter(
            f"--set {' '.join(overrides)}: only parallel.ranks, a whole number, may change when a run is resumed"
        )
    return ranks


@app.command()
def digest(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run that succeeded.")], as_json: AsJson = False
) -> None:
    """Print hashes of a run's final weights, optimizer state and loss log, to compare two runs."""
    from tandem.runs.run_ending import digest_run

    found = digest_run(run_dir)
    echo(json.dumps(found, indent=2) if as_json else "\n".join(f"{what} {hash_}" for what, hash_ in found.items()))


@app.command()
def serve(
    source: Source,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory for the token. Default: serve/ in the run, or .tandem/serve.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    thinking: Thinking = False,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Keep each chat in --data-dir, up to 1 GiB, and take thumbs for its id.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="Serve a run's checkpoint of this step. Default: its final weights.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to serve it under. Default: the directory's.")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR", help="Serve a LoRA adapter of it, too: a directory, RUN or RUN@STEP. Repeatable."
        ),
    ] = None,
    adapters_file: Annotated[
        Path | None, typer.Option(help="JSON file, {NAME: DIR}, of more adapters; it is read again when it changes.")
    ] = None,
    engine: Annotated[
        Literal["auto", "hf", "vllm"],
        typer.Option(help="hf: the embedded engine. vllm: vLLM. auto: vLLM on a GPU where it is installed, else hf."),
    ] = "auto",
    option: EngineTable = None,
    adapter_slots: Annotated[
        int, typer.Option(min=0, help="With vllm: most adapters at a time. Default: those named, and 32 for a file.")
    ] = 0,
    max_rank: Annotated[int, typer.Option(min=0, help="With vllm: highest adapter rank. 0: of those named.")] = 0,
) -> None:
    """Serve a model over OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions."""
    from tandem.recipes.serve import default_data_dir, engine_here, serve_model
    from tandem.serve.http.run import Listen
    from tandem.spec.load import parse_own_engine

    listen = Listen(data_dir or default_data_dir(source), host, port, ready_file, insecure)
    spec = engine_here(source, option or ()) if engine == "auto" else parse_own_engine(engine, option or ())
    serve_model(
        source, listen, spec, thinking=thinking, feedback=feedback, step=step,
        name=name, adapters=adapter or (), adapters_file=adapters_file, adapter_slots=adapter_slots, max_rank=max_rank,
    )  # fmt: skip


@app.command()
def chat(
    source: Annotated[
        str, typer.Argument(metavar="DIR", help="Run directory, model directory, hub id, or name of a deployment.")
    ],
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one answer.")] = 512,
    system: Annotated[str, typer.Option(help="System message. Default: none.")] = "",
    thinking: Thinking = False,
) -> None:
    """Chat with a model in the terminal."""
    from tandem.serve.deployment_chat import chat_with_deployment, is_deployment

    if is_deployment(source):
        chat_with_deployment(source, temperature=temperature, max_tokens=max_tokens, system=system, thinking=thinking)
        return
    from tandem.recipes.serve import chat_with

    chat_with(source, temperature=temperature, max_tokens=max_tokens, system=system, thinking=thinking)


@app.command("eval")
def evaluate(
    source: Source,
    spec: Annotated[Path | None, typer.Option(help="TOML spec with the tasks. Default: the run's own spec.")] = None,
    base: Annotated[str, typer.Option(help="Run, model or hub id to compare with. Default: no comparison.")] = "",
    out: Annotated[Path | None, typer.Option(help="Directory for the result. Default: evals/ in the run.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out tasks. With --base, compare it with another model and print a verdict."""
    from tandem.recipes.evaluation import evaluate_model
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ()) if spec else None
    judged = evaluate_model(source, checked, base=base, directory=out)
    echo(json.dumps(judged.row(), indent=2) if as_json else judged.text())


@app.command()
def export(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run that succeeded, or an online server's data directory.")
    ],
    merge: Annotated[bool, typer.Option("--merge", help="After LoRA training: export the merged model.")] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="Export the checkpoint of this step. Default: the final weights.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="Online server: version to export, a number, anchor-N or current. Default: current.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write. Default: deploy/ in the run, export/ in the data directory."),
    ] = None,
    push: Annotated[
        str, typer.Option(metavar="REPO", help="Also upload to this Hugging Face repository, user/name. Default: none.")
    ] = "",
    base: Annotated[
        str, typer.Option(metavar="ID", help="Adapter: its base's id on the hub, user/name. Default: as the base says.")
    ] = "",
    gguf: Annotated[
        Literal["f32", "f16", "bf16", "q8_0", "q4_1"] | None,
        typer.Option(help="Write one GGUF file of this kind, for llama.cpp, and a Modelfile for Ollama. Default: no."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make a new repository public.")] = False,
) -> None:
    """Write a deployable copy of a run's or an online server's model, with a model card."""
    from tandem.recipes.export import export_run

    copy = export_run(
        run_dir, merge=merge, step=step, version=version, directory=out, push=push, public=public, base=base,
        gguf=gguf or "",
    )  # fmt: skip
    echo(copy)
    if (Path(copy) / "Modelfile").exists():
        echo(f"for Ollama: cd {copy} && ollama create my-model -f Modelfile", err=True)


@spec_app.command("schema")
def spec_schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from tandem.spec.load import json_schema

    echo(json.dumps(json_schema(), indent=2))


@spec_app.command("show")
def spec_show(spec: SpecFile, overrides: Overrides = None) -> None:
    """Check SPEC and print it as TOML with all defaults."""
    from tandem.spec.load import load_spec, to_toml

    echo(to_toml(load_spec(spec, overrides or ())), nl=False)


@gateway_app.command("serve")
def gateway_serve(
    model: Annotated[
        str, typer.Option(help="A model directory, run directory or hub id. With --engine-url: for its tokenizer only.")
    ],
    engine_url: Annotated[str, typer.Option(help="URL of a running engine. Default: run one in this process.")] = "",
    engine_token_file: Annotated[Path | None, typer.Option(help="With --engine-url: file with its token.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory for the token and the sessions. Default: .tandem/gateway.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    thinking: Thinking = False,
    trajectories: Annotated[
        Path | None, typer.Option(help="Directory for rewarded groups, as JSONL. Default: trajectories/ in --data-dir.")
    ] = None,
    idle_s: Annotated[
        float, typer.Option(min=1, help="Seconds without a request after which a session is deleted.")
    ] = 3600,
    rollouts: Annotated[
        str, typer.Option(help="URL of a rollout service to send rewarded groups to. Default: write files.")
    ] = "",
    rollouts_token_file: Annotated[Path | None, typer.Option(help="With --rollouts: file with its token.")] = None,
) -> None:
    """Serve an OpenAI endpoint that records an agent's requests as trajectories and accepts rewards for them."""
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


app.command()(atropos)
app.command()(init)
app.command()(samples)
app.command()(sweep)
app.command("feedback")(feedback_command)
for command in (runs, watch, explain, report, compare, login, submit, cancel, logs, pull):
    app.command()(command)
app.command()(targets)
for command in (deploy, deployments, promote, rollback, undeploy):
    app.command()(command)
app.command()(mcp)
app.command()(dashboard)
app.command()(top)
app.command(hidden=True)(agent)


def main() -> None:
    """Run the command line; print Tandem's own errors without a traceback and exit with their code."""
    for stream in (sys.stdout, sys.stderr):
        _replace_unknown_characters(stream)
    try:
        app()
    except TandemError as error:
        echo(f"tandem: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        from tandem.io.extras import explain_missing
        from tandem.runs.failure_diagnosis import interrupted, told_by_the_system

        if interrupted(error):
            sys.exit(130)
        if not (reason := told_by_the_system(error) or explain_missing(error)):
            sys.excepthook = lambda _, error, __: echo("".join(traceback.format_exception(error)), nl=False, err=True)
            raise
        echo(f"tandem: {reason}", err=True)
        sys.exit(2)


def _replace_unknown_characters(stream: Any) -> None:
    """Print `?` for characters that the terminal cannot encode; otherwise the blocks of a curve would raise an
    error."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
