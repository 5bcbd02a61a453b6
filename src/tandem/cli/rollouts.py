"""`tandem rollouts ...`: serve a queue of scored groups, and watch it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson, Host, Insecure, Port, ReadyFile, echo

rollouts_app = typer.Typer(help="Queue groups from many environments for one trainer, over HTTP.", no_args_is_help=True)


@rollouts_app.command("serve")
def rollouts_serve(
    data_dir: Annotated[
        Path, typer.Option(help="Directory for the queue, its leases and the token; one server at a time.")
    ] = Path(".tandem") / "rollouts",
    host: Host = "127.0.0.1",
    port: Port = 8200,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    atropos: Annotated[bool, typer.Option("--atropos", help="Also serve Atropos' endpoints for its clients.")] = False,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="With --atropos on loopback: its endpoints need no token.")
    ] = False,
    gateway: Annotated[
        str, typer.Option(help="URL of the gateway that Atropos environments sample from. Default: none.")
    ] = "",
    gateway_token_file: Annotated[Path | None, typer.Option(help="With --gateway: file with its token.")] = None,
) -> None:
    """Queue scored groups from environments, durably, and hand each to the trainer once."""
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
        str, typer.Argument(metavar="URL|DATA_DIR", help="URL, data directory or ready file of a rollout service.")
    ],
    token_file: Annotated[Path | None, typer.Option(help="With a URL: file with its token.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between two frames.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Watch a rollout service: queue, age of groups, rates, environments, dropped and refused groups."""
    from tandem.obs.rollouts_status import rollouts_status

    if not (once or as_json):
        from tandem.obs.rollouts_top import watch_rollouts

        return watch_rollouts(source, token_file=token_file, every_s=every)
    status = rollouts_status(source, token_file=token_file)
    if as_json:
        return echo(json.dumps(status, indent=2))
    from tandem.obs.rollouts_top import print_frame

    print_frame(status)
