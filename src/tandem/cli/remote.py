"""Commands for runs on a control server: login, submit, cancel, logs, pull. A run's id is taken wherever a run
directory is: its mirror is pulled first."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.options import AsJson, Overrides, echo
from tandem.runs.named_runs import is_run_id, look_remote, mirror_of

if TYPE_CHECKING:
    from tandem.client import RemoteRun, Tandem
    from tandem.shapes.runs import OfferInfo

RunOrDir = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or the id of a run on a control server.")
]


def login(
    url: Annotated[str, typer.Argument(help="URL of a control server, as it prints it: https://HOST.")],
    key_file: Annotated[
        Path | None, typer.Option(help="File that holds the key. Default: ask for it, or read one line of stdin.")
    ] = None,
    oidc: Annotated[
        bool, typer.Option("--oidc", help="Sign in with the server's OpenID provider, in a browser, for a key.")
    ] = False,
) -> None:
    """Keep a control server and your key in ~/.config/tandem/control.toml, which only you can read."""
    from tandem.client import Place, Tandem, save_place
    from tandem.client.openid import sign_in

    url, signed_in = url.rstrip("/"), None
    if oidc:
        key, signed_in = sign_in(url, _show_address)
    elif key_file is not None:
        key = key_file.read_text(encoding="utf-8").strip()
    elif sys.stdin.isatty():
        key = typer.prompt("key", hide_input=True).strip()
    else:
        key = sys.stdin.readline().strip()
    with Tandem(url, key, patience_s=5.0) as server:
        me = server.me()
    saved = save_place(Place(url, key, me.signing_key, signed_in))
    echo(f"{saved}: org {me.org_name}, {', '.join(me.scopes)}")
    if signed_in is not None and not signed_in.refresh_token:
        until = time.strftime("%H:%M", time.localtime(signed_in.expires_at / 1000))
        echo(f"{signed_in.issuer} gave no refresh token: sign in again at {until}", err=True)


def _show_address(address: str) -> None:
    import threading
    import webbrowser

    echo(f"sign in with a browser on this machine:\n{address}")
    # A browser in the terminal ends only after the sign-in, for which this process must go on meanwhile.
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file: the very one that runs locally.")],
    target: Annotated[str, typer.Option(help="Name of a target of the server; `tandem targets` lists yours.")],
    max_cost: Annotated[float, typer.Option(min=0, help="US dollars that it may cost at most; 0: no limit.")] = 0.0,
    name: Annotated[str, typer.Option(help="Default: the spec's own name.")] = "",
    project: Annotated[str, typer.Option(help="Project of your org.")] = "default",
    group: Annotated[str, typer.Option(help="A word that runs of one sweep share. Default: none.")] = "",
    retries: Annotated[int, typer.Option(min=0, max=100, help="Further attempts after failures that may pass.")] = 3,
    secret: Annotated[
        list[str] | None,
        typer.Option(help="Name of a secret of the server: a variable of the trainer's environment. Repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the run.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Submit SPEC to a control server: show the plan, ask, and follow the run. Ctrl-C leaves it running."""
    from tandem.client import Tandem
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ()).in_place()
    with Tandem() as server:
        if not as_json:
            _show_plan(server, checked, target, max_cost)
        if not (yes or as_json) and not typer.confirm("Submit?", default=False):
            raise typer.Exit(1)
        run = server.submit(
            checked.as_written(), target=target, max_cost_usd=max_cost, name=name, project=project, group=group,
            retries=retries, secrets=secret or (),
        )  # fmt: skip
        if as_json:
            echo(run.info().model_dump_json(indent=2))
        else:
            echo(f"{run.id}: queued on {target}")
        if not (detach or as_json):
            _leave(watch_remote(run, once=False, as_json=False))


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN_ID", help="Id of a run on a control server.")],
    save: Annotated[bool, typer.Option("--save", help="Save a checkpoint first; it can be resumed then.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a run on a control server. Its processes end within seconds."""
    from tandem.client import Tandem

    with Tandem() as server:
        found = server.run(run).cancel(save=save)
    told = f"{found.id}: {found.state}" + ("" if found.ended_at else f", asked to {found.want}")
    echo(found.model_dump_json(indent=2) if as_json else told)


def pull(
    run: Annotated[str, typer.Argument(metavar="RUN_ID", help="Id of a run on a control server.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to write. Default: runs/RUN_ID. Again: what is new.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy the mirror of a run: log, metrics, samples, status, byte by byte. Weights are not in it."""
    from tandem.client import Tandem

    with Tandem() as server:
        done = server.run(run).pull(directory or Path("runs") / run)
    told = {"directory": str(done.directory), "files": done.files, "bytes": done.bytes}
    echo(json.dumps(told) if as_json else f"{done.directory}: {done.files} files, {done.bytes:,} bytes new")


def logs(
    run: RunOrDir,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run has ended.")] = False,
    file: Annotated[str, typer.Option(help="File of the run directory to print.")] = "log.txt",
) -> None:
    """Print the log of a run."""
    if not is_run_id(run):
        path = Path(run) / file
        if not path.exists():
            raise typer.BadParameter(f"{path}: there is no such file")
        _print_bytes(path.read_bytes())
        return
    from tandem.client import Tandem

    with Tandem() as server:
        try:
            _logs(server.run(run), file, follow=follow)
        except KeyboardInterrupt:
            echo(f"\n{run} goes on", err=True)


def _logs(run: RemoteRun, file: str, *, follow: bool) -> None:
    from tandem.client.requests import settled
    from tandem.errors import ControlNotKnown

    at = generation = 0
    while True:
        over = settled(run.info())
        try:
            data, now, _ = run.read(file, at)
            if now != generation and at:  # it was cut back or replaced: print it from its beginning
                at, data = 0, b""
            _print_bytes(data)
            at, generation = at + len(data), now
        except ControlNotKnown as error:
            if not follow or error.field != "file":
                raise
            data = b""
        if data:
            continue
        if over or not follow:
            return
        time.sleep(1.0)


def _print_bytes(data: bytes) -> None:
    from tandem.obs.claims import printable

    text = data.decode("utf-8", errors="replace")
    echo("\n".join(printable(line) for line in text.split("\n")), nl=False)


# --- follow


def watch_remote(run: RemoteRun, *, once: bool, as_json: bool) -> str:
    """Print a run's progress, as for a directory, until it has ended; return its state. Ctrl-C leaves it running."""
    from tandem.runs.watch import watch_run

    try:
        return watch_run(mirror_of(run.id), once=once, as_json=as_json, tell=echo, see=lambda: look_remote(run))
    except KeyboardInterrupt:
        echo(f"\n{run.id} goes on. `tandem watch {run.id}` follows it, `tandem cancel {run.id}` ends it", err=True)
        return "left"


def _leave(state: str) -> None:
    if state == "failed":
        raise typer.Exit(1)


# --- before it is submitted


def _show_plan(server: Tandem, spec: Any, target: str, max_cost: float) -> None:
    """Print where the run would go, and what it is likely to take there."""
    from tandem.errors import SpecError
    from tandem.spec.parallel import check_hosts

    there = {each.name: each for each in server.targets()}
    if target not in there:
        raise SpecError(f"--target {target}: the server has {', '.join(sorted(there)) or 'none'}")
    found, parallel = there[target], spec.parallel
    check_hosts(parallel, target, found.kind)
    if found.error:
        echo(f"{target} ({found.kind}) does not answer now: {found.error}")
    for offer in found.offers:
        cards = f"{offer.gpus} x {offer.gpu or 'GPU'}" if offer.gpus else f"{offer.cpus} CPUs"
        if offer.hosts < parallel.hosts:
            offer = offer.model_copy(update={"now": False, "fits": False, "why_not": f"it has {offer.hosts} hosts"})
        state = "now" if offer.now else f"{'later' if offer.fits else 'never'}: {offer.why_not}"
        echo(f"{target} ({found.kind})  {offer.name}  {cards}  {offer.usd_per_hour:g} USD/h  {state}")
        echo(_estimate(spec, offer) or _estimate_by(server, spec, target, offer))
    if parallel.hosts > 1:
        each = f"{parallel.row_shards} of its {parallel.ranks} ranks on each"
        echo(f"It takes {parallel.hosts} hosts at once, {each}; a price by the hour is of one host.")
    if found.kind != "local" and (files := sorted(set(spec.local_files()))):
        echo(f"The spec names files of this machine; {target} must have them there, too: {', '.join(files)}")
    echo(f"It is stopped before it costs more than {max_cost:g} USD." if max_cost else "It has no cost limit.")


def _estimate(spec: Any, offer: OfferInfo) -> str:
    """Return the planner's estimate for an offer in a line; why there is none, where the planner cannot say. Empty in
    the light install, which has no planner."""
    from tandem.errors import TandemError

    try:
        from tandem.recipes.plan_run import plan_run
        from tandem.runs.planner.calibration import card_within, known
    except ModuleNotFoundError:
        return ""
    gpu = card_within(offer.gpu) if offer.gpus else "cpu"
    if not gpu:
        return f"No estimate for '{offer.gpu}': the planner knows {', '.join(known())}"
    try:
        planned: dict[str, Any] = plan_run(spec, gpu=gpu).as_json()
    except ModuleNotFoundError:
        return ""
    except TandemError as error:
        return f"No estimate: {error}"
    seconds, fits = float(planned["times"]["steps_s"]), "" if planned["fits"] else "; it does not fit"
    usd = seconds / 3600 * max(1, spec.parallel.hosts) * offer.usd_per_hour
    return f"Estimate for {gpu}: {planned['peak_gib']:.1f} GiB{fits}, {seconds:,.0f} s of steps, {usd:.2f} USD"


def _estimate_by(server: Tandem, spec: Any, target: str, offer: OfferInfo) -> str:
    """Return the server's estimate for an offer in a line."""
    from tandem.errors import TandemError

    try:
        planned = server.plan(spec.as_written(), target=target)
    except TandemError as error:
        return f"No estimate: {error}"
    found = next((each for each in planned.estimates if each.offer == offer), None)
    if found is None or found.why_not:
        return f"No estimate: {found.why_not if found is not None else 'the offer is gone'}"
    fits = "" if found.fits else "; it does not fit"
    return (
        f"The server's estimate for {found.gpu}, with usual lengths of prompts and rows: {found.memory_gib:.1f} GiB"
        f"{fits}, {found.seconds:,.0f} s of steps, {found.cost_usd:.2f} USD"
    )


def resume_remote(run_id: str, max_cost: float | None, *, as_json: bool) -> None:
    from tandem.client import Tandem

    with Tandem() as server:
        found = server.run(run_id).resume(max_cost_usd=max_cost)
    echo(found.model_dump_json(indent=2) if as_json else f"{run_id}: {found.state}")


def print_runs(as_json: bool) -> bool:
    """Print the runs of the configured control server; return whether there is one."""
    from tandem.client import Tandem, find_place

    if find_place() is None:
        return False
    with Tandem() as server:
        found = server.runs()
        url = server.url
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
        return True
    echo(f"runs of {url}; those of a directory: tandem runs DIR")
    for each in reversed(found):
        steps = f"{each.step}/{each.steps_total}" if each.steps_total else ""
        words = (each.id, each.name, each.target, each.state, steps, f"{each.cost_usd:.2f} USD", each.verdict, each.why)
        echo("  ".join(filter(None, words)))
    return True
