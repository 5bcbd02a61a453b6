"""Commands for models behind names on a control server: deploy, deployments, promote, rollback, undeploy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.options import AsJson

if TYPE_CHECKING:
    from tandem.shapes.deployments import DeploymentInfo

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a deployment.")]


def deploy(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="Id of a run, and a saved step. Default: its last.")],
    name: Annotated[str, typer.Option(help="The name that clients ask as their model.")],
    weight: Annotated[int, typer.Option(min=0, max=1000, help="Its share of the requests. First revision: 100.")] = 0,
    target: Annotated[str, typer.Option(help="Target that holds the run's weights. Default: the run's own.")] = "",
    as_json: AsJson = False,
) -> None:
    """Put a checkpoint behind a name, as its next revision. OpenAI's clients ask it at the control server."""
    from tandem.client import Tandem

    run_id, _, step = run.partition("@")
    if step and not (step.isascii() and step.isdigit()):
        raise typer.BadParameter(f"'{run}': write the step as a number, as in {run_id}@20")
    with Tandem() as server:
        number = int(step) if step else server.run(run_id).info().step
        _show(server.deploy(run_id, number, name=name, weight=weight, target=target), as_json)


def deployments(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Show only this one. Default: all.")] = "",
    as_json: AsJson = False,
) -> None:
    """List deployments, their revisions and weights."""
    from tandem.client import Tandem

    with Tandem() as server:
        found = [server.deployment(name)] if name else server.deployments()
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    for each in () if as_json else found:
        _show(each, as_json=False)


def promote(
    revision: Annotated[str, typer.Argument(metavar="NAME@N", help="The revision that gets all requests.")],
    as_json: AsJson = False,
) -> None:
    """Give all requests of a name to one revision. It must answer already."""
    from tandem.client import Tandem

    name, _, n = revision.partition("@")
    if not (n.isascii() and n.isdigit()):
        raise typer.BadParameter(f"'{revision}': write a name and a revision, as in support@2")
    with Tandem() as server:
        _show(server.promote(name, int(n)), as_json)


def rollback(name: Name, as_json: AsJson = False) -> None:
    """Undo the last promote of a name."""
    from tandem.client import Tandem

    with Tandem() as server:
        _show(server.rollback(name), as_json)


def undeploy(name: Name, as_json: AsJson = False) -> None:
    """Take a name away. Its replicas answer what they have begun, and end."""
    from tandem.client import Tandem

    with Tandem() as server:
        gone = server.undeploy(name)
    typer.echo(gone.model_dump_json(indent=2) if as_json else f"{gone.name}: undeployed")


def _show(found: DeploymentInfo, as_json: bool) -> None:
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    for each in found.revisions:
        state = "ready" if each.ready else f"{each.state}{f': {each.why}' if each.why else ''}"
        typer.echo(f"{found.name}@{each.n}  {each.run}@{each.step}  weight {each.weight}  {state}")
