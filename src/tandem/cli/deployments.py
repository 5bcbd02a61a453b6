"""Commands for models behind names on a control server: deploy, deployments, promote, rollback, undeploy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.cli.options import AsJson, echo

if TYPE_CHECKING:
    from tandem.client import RemoteRun
    from tandem.shapes.deployments import DeploymentInfo, Measured

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a deployment.")]


def deploy(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="Id of a run, and a saved step. Default: its last.")
    ] = "",
    *,
    name: Annotated[str, typer.Option(help="The name that clients ask as their model.")],
    weight: Annotated[int, typer.Option(min=0, max=1000, help="Its share of the requests. First revision: 100.")] = 0,
    canary: Annotated[
        str, typer.Option(metavar="SHARE", help="Try it on this share of the requests, such as 5%. Default: do not.")
    ] = "",
    keep_s: Annotated[
        int, typer.Option(min=0, help="End its replica after so many seconds without a request. Default: never.")
    ] = 0,
    feedback: Annotated[bool, typer.Option("--feedback", help="Keep its chats, and take thumbs for them.")] = False,
    engine: Annotated[
        Literal["hf", "vllm"], typer.Option(help="hf: the embedded engine. vllm: the vLLM that the run's spec names.")
    ] = "hf",
    target: Annotated[str, typer.Option(help="Target that holds the run's weights. Default: the run's own.")] = "",
    online: Annotated[
        str, typer.Option(metavar="SERVER", help="An online server of the operator's file of targets, in place of RUN.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Put a checkpoint behind a name, as its next revision. OpenAI's clients ask it at the control server."""
    from tandem.client import Tandem

    if bool(run) == bool(online):
        raise typer.BadParameter("write either RUN[@STEP], or --online SERVER")
    if online:
        if weight or canary or keep_s or feedback or target or engine != "hf":
            raise typer.BadParameter("--online: an online server makes its own versions; give --name alone with it")
        with Tandem() as server:
            _show(server.deploy_online(online, name=name), as_json)
        return
    run_id, _, step = run.partition("@")
    if step and not (step.isascii() and step.isdigit()):
        raise typer.BadParameter(f"'{run}': write the step as a number, as in {run_id}@20")
    with Tandem() as server:
        number = int(step) if step else _last_saved(server.run(run_id))
        made = server.deploy(
            run_id, number, name=name, weight=weight, canary=_share(canary), keep_s=keep_s, feedback=feedback,
            engine=engine, target=target,
        )  # fmt: skip
        _show(made, as_json)


def _last_saved(run: RemoteRun) -> int:
    """Return the last step that the run saved; say so if it is not its last step."""
    from tandem.errors import ControlNotKnown

    text, last = b"", run.info().step
    try:
        while len(text) < (read := run.read("events.jsonl", len(text)))[2] and read[0]:
            text += read[0]
    except ControlNotKnown:  # it has no events yet
        pass
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    saved = [int(row["step"]) for row in rows if row.get("stage") == "checkpoint"]
    if not saved:
        raise typer.BadParameter(f"'{run.id}' has saved no step yet, so there is nothing to deploy")
    if saved[-1] != last:
        echo(f"step {last} of {run.id} was not saved; step {saved[-1]} is deployed", err=True)
    return saved[-1]


def deployments(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Show only this one. Default: all.")] = "",
    as_json: AsJson = False,
) -> None:
    """List deployments, their revisions and weights."""
    from tandem.client import Tandem

    with Tandem() as server:
        found = [server.deployment(name)] if name else server.deployments()
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
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
    """Take the canary of a name away, if there is one; otherwise undo the last promote."""
    from tandem.client import Tandem

    with Tandem() as server:
        _show(server.rollback(name), as_json)


def undeploy(name: Name, as_json: AsJson = False) -> None:
    """Take a name away. Its replicas answer what they have begun, and end."""
    from tandem.client import Tandem

    with Tandem() as server:
        gone = server.undeploy(name)
    echo(gone.model_dump_json(indent=2) if as_json else f"{gone.name}: undeployed")


def _show(found: DeploymentInfo, as_json: bool) -> None:
    if as_json:
        return echo(found.model_dump_json(indent=2))
    if found.online:
        echo(f"{found.name}  the online server {found.online}, which makes its own versions")
    for each in found.revisions:
        share = f"canary {each.canary * 100:g} %" if each.canary else f"weight {each.weight}"
        state = "asleep" if each.asleep else "ready" if each.ready else each.state
        why = f": {each.why}" if each.why and not each.asleep else ""
        echo(f"{found.name}@{each.n}  {each.run}@{each.step}  {share}  {state}{why}")
        if each.errors.count:
            echo(f"  failed   {_rate(each.errors)}")
            echo(f"  seconds  {_mean(each.seconds)}\n  feedback {_mean(each.feedback)}")


def _rate(of: Measured) -> str:
    failed = round(of.mean * of.count)
    return f"{failed} of {of.count} ({of.mean * 100:.2g} %, {of.low * 100:.2g} to {of.high * 100:.2g} %)"


def _mean(of: Measured) -> str:
    if of.count < 2:
        return f"{of.mean:.3g} (one answer)" if of.count else "none"
    return f"{of.mean:.3g} ({of.low:.3g} to {of.high:.3g}; {of.count} answers)"


def _share(text: str) -> float:
    """Return a share, written as 5% or 0.05; 0 for no text."""
    try:
        share = float(text.removesuffix("%") or 0) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not (0 < share < 1 or not text):
        raise typer.BadParameter(f"--canary = '{text}': write a share above 0 and below 1, such as 5%")
    return share
