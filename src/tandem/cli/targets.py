"""`tandem targets`: what each configured machine, cluster or cloud offers now."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.options import AsJson, echo

if TYPE_CHECKING:
    from tandem.recipes.targets import TargetOffers


def targets(
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that a job needs on each host.")] = 0,
    gpu: Annotated[str, typer.Option(help="Part of the GPU's name, as in H100. Default: any.")] = "",
    gpu_memory_gib: Annotated[float, typer.Option(min=0, help="GiB of memory of each GPU. Default: any.")] = 0.0,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts that a job needs.")] = 1,
    file: Annotated[
        Path | None, typer.Option(help="Default: ~/.config/tandem/targets.toml; if there is none, this machine.")
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Those of the control server, which `tandem submit --target` takes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what each target offers now, its price, and why not. Starts nothing. Exit code 1: no target fits."""
    from tandem.errors import SpecError
    from tandem.job_types import Need
    from tandem.recipes.targets import list_targets

    need = Need(gpus=gpus, gpu=gpu, gpu_memory_gib=gpu_memory_gib, hosts=hosts)
    if server and (file is not None or need != Need()):
        raise SpecError("--server: lists all targets of the server as they are; leave the other options out")
    found = _of_server() if server else list_targets(need, file=file)
    if as_json:
        echo(json.dumps([asdict(each) for each in found], indent=2))
    for each in () if as_json else found:
        if each.error:
            echo(f"{each.target}  {each.kind}  no answer: {each.error}")
        for offer in each.offers:
            cards = f"{offer.gpus} x {offer.gpu or 'GPU'} " if offer.gpus else ""
            memory = f"{offer.gpu_memory_gib:g} GiB  " if offer.gpu_memory_gib else ""
            price = f"{offer.usd_per_hour:.2f} USD/h" if offer.usd_per_hour else "no price"
            state = "now" if offer.now else f"{'busy' if offer.fits else 'no'}: {offer.why_not}"
            size = f"{offer.cpus} CPUs  {offer.memory_gib:g} GiB"
            place = f"{offer.hosts} x {offer.name}" if offer.hosts > 1 else offer.name
            echo(f"{each.target}  {each.kind}  {place}  {cards}{memory}{size}  {price}  {state}")
    if not any(offer.fits for each in found for offer in each.offers):
        raise typer.Exit(1)


def _of_server() -> list[TargetOffers]:
    from tandem.client import Tandem
    from tandem.job_types import Offer
    from tandem.recipes.targets import TargetOffers

    with Tandem() as client:
        return [
            TargetOffers(each.name, each.kind, [Offer(**offer.model_dump()) for offer in each.offers], each.error)
            for each in client.targets()
        ]
