"""Command-line options that several commands share, with the same help text in each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.obs.live_view import LiveView
    from tandem.spec.run import RunSpec

SpecOrNone = Annotated[
    Path | None,
    typer.Argument(metavar="SPEC", help="TOML file, as in examples/quickstart.toml. Without it, --set says all."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one value of the spec, as in --set train.lr=1e-4. Repeatable."
    ),
]
EngineTable = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the engine table, as in --set max_running=64."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors; the run's files say the rest.")]
Host = Annotated[str, typer.Option(help="Address to listen on. Only this machine can reach the default.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free port, which the ready file names.")
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="JSON file to write once the server listens: url, pid, token_file. Default: none.")
]
Insecure = Annotated[bool, typer.Option(help="Allow a --host that other machines reach, without TLS.")]
Thinking = Annotated[
    bool, typer.Option("--thinking/--no-thinking", help="Render the chat template with thinking on or off.")
]


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print text of any origin: it cannot control the terminal."""
    from tandem.obs.claims import visible

    typer.echo(visible(str(text).replace("\r\n", "\n")), err=err, nl=nl)


def checked_spec(spec: Path | None, overrides: Sequence[str] | None) -> RunSpec:
    """Return the checked spec of a file and its overrides, or of overrides alone."""
    from tandem.spec.load import load_spec, parse_overrides, parse_spec

    if spec is not None:
        return load_spec(spec, overrides or ())
    if not overrides:
        raise typer.BadParameter(
            "SPEC: name a TOML file, or say all of it here: --set recipe=sft --set model.path=DIR "
            "--set data.path=rows.jsonl --set train.steps=100 --set train.lr=1e-5. `tandem init` writes a file"
        )
    return parse_spec(parse_overrides(overrides))


def view_of(*, quiet: bool, as_json: bool) -> LiveView | None:
    """Return the view of a run for these options: silent, on stderr, or None for the usual one."""
    if quiet and as_json:
        raise typer.BadParameter("--quiet and --json cannot be combined: with --json, stdout has the result only")
    if not quiet and not as_json:
        return None
    from tandem.obs.live_view import LiveView, OutlivedConsole

    return LiveView(console=OutlivedConsole(highlight=False, stderr=as_json, quiet=quiet))


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        echo(f"tandem {version('tandem-rl')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
