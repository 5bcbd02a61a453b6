"""`tandem control ...`: serve a control plane and look after it."""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tandem.cli.options import AsJson, Host, Insecure, Port, ReadyFile, echo

control_app = typer.Typer(
    help="Serve runs on your machines to a team, and look after the server.", no_args_is_help=True
)
key_app = typer.Typer(help="Make, list and revoke keys of a control server.", no_args_is_help=True)
secret_app = typer.Typer(help="Set, list and delete the secrets that trainers of runs get.", no_args_is_help=True)
control_app.add_typer(key_app, name="key")
control_app.add_typer(secret_app, name="secret")

DataDir = Annotated[Path, typer.Option(help="Directory for the database, the mirrors and the token.")]
Database = Annotated[
    str, typer.Option(help="PostgreSQL: postgresql+psycopg://USER@HOST/NAME. Default: SQLite in --data-dir.")
]
_HOME = Path(".tandem") / "control"


@control_app.command("serve")
def control_serve(
    data_dir: DataDir = _HOME,
    host: Host = "127.0.0.1",
    port: Port = 8700,
    database: Database = "",
    targets: Annotated[
        Path | None, typer.Option(help="File of targets. Default: ~/.config/tandem/targets.toml, or this machine.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Where the targets' machines reach this server. Default: where it listens.")
    ] = "",
    secrets_key_file: Annotated[
        Path | None,
        typer.Option(help="File of the master keys of secrets. Default: TANDEM_SECRETS_KEY, or one in --data-dir."),
    ] = None,
    requests_per_second: Annotated[
        float, typer.Option(min=0, help="Requests that each key may send for long, four times as many at once; 0: any.")
    ] = 50.0,
    oidc: Annotated[
        Path | None, typer.Option(help="TOML file of the OpenID provider where people sign in. Default: keys only.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
) -> None:
    """Take specs over HTTP, run each on a target, and bring it to its end. Runs go on while the server is down."""
    from tandem.io.extras import require_extra

    require_extra("control", "sqlalchemy", "alembic", "cryptography", "fastapi", "uvicorn")
    from tandem.assistant.door import AssistantDoor
    from tandem.client.place import READY_FILE
    from tandem.recipes.control import serve_control
    from tandem.serve.http.run import Listen

    if oidc is not None:
        require_extra("oidc", "joserfc")
    listen = Listen(data_dir, host, port, ready_file or data_dir / READY_FILE, insecure)
    has_mcp = find_spec("mcp") is not None
    if not has_mcp:
        echo('no assistant can connect: install "tandem-rl[control,mcp]" for /mcp')
    serve_control(
        listen, database=database, targets=targets, url=url, secrets_key_file=secrets_key_file,
        requests_per_s=requests_per_second, oidc=oidc, assistant=AssistantDoor if has_mcp else None,
    )  # fmt: skip


@control_app.command("backup")
def control_backup(
    to: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write; it must not exist.")],
    data_dir: DataDir = _HOME,
    mirrors: Annotated[bool, typer.Option("--mirrors/--no-mirrors", help="Also copy the mirrored files.")] = True,
) -> None:
    """Copy the SQLite database, the secrets and the mirrors. The server may run meanwhile."""
    from tandem.control.maintenance import backup

    echo(f"{to}: {backup(data_dir, to, mirrors=mirrors) / 2**20:.1f} MiB")


@control_app.command("restore")
def control_restore(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `tandem control backup` wrote.")],
    data_dir: DataDir = _HOME,
) -> None:
    """Make a data directory from a backup. Runs that were submitted after it are unknown then, and their jobs end."""
    from tandem.control.maintenance import restore

    echo(f"{data_dir}: restored, revision {restore(source, data_dir)}; start it with `tandem control serve`")


@control_app.command("upgrade")
def control_upgrade(data_dir: DataDir = _HOME, database: Database = "") -> None:
    """Bring the database to this release's tables, as `serve` does when it starts. Take a backup before."""
    from tandem.control.maintenance import upgrade

    before, after = upgrade(data_dir, database)
    echo(f"revision {after}" if before in ("", after) else f"upgraded from revision {before} to {after}")


@control_app.command("doctor")
def control_doctor(data_dir: DataDir = _HOME, database: Database = "", as_json: AsJson = False) -> None:
    """Check the data directory and the database; nothing is changed. Exit code 1: something is wrong."""
    from tandem.control.maintenance import doctor

    found = list(doctor(data_dir, database))
    if as_json:
        echo(json.dumps([asdict(each) for each in found], indent=2))
    for each in () if as_json else found:
        echo(f"{'ok   ' if each.ok else 'WRONG'} {each.what}: {each.says}")
    if not all(each.ok for each in found):
        raise typer.Exit(1)


@control_app.command("audit")
def control_audit(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the log in --data-dir instead: that no row was changed or taken out."),
    ] = False,
    data_dir: DataDir = _HOME,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Print who did what on the server that TANDEM_CONTROL names. Exit code 1: a row is not as it was written."""
    if verify:
        from tandem.control.maintenance import verify as verified

        found = verified(data_dir, database)
        if as_json:
            echo(json.dumps(asdict(found), indent=2))
        else:
            echo(f"WRONG: {found.problem}" if found.problem else f"{found.rows} rows, as they were written")
        raise typer.Exit(1 if found.problem else 0)
    from tandem.client import Tandem

    with Tandem() as server:
        rows = list(server.audit())
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in rows], indent=2))
    for each in () if as_json else rows:
        told = {name: value for name, value in each.told.items() if name not in ("id", "at", "spec_toml")}
        echo(f"{each.n}  {_utc(each.at)}  {each.actor}  {each.action}  {each.item}  {json.dumps(told)}")


# --- over the server


@control_app.command("usage")
def control_usage(
    since: Annotated[
        str, typer.Option(help="Date or time in UTC, as 2026-01-31; attempts that ended from then on.")
    ] = "",
    until: Annotated[str, typer.Option(help="The same; attempts that ended before.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what each attempt used, once: seconds from its claim to its end, and US dollars."""
    from tandem.client import Tandem

    with Tandem() as server:
        rows = list(server.usage(since=_millis(since, "--since"), until=_millis(until, "--until")))
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in rows], indent=2))
    elif as_csv:
        table = StringIO()
        out = csv.writer(table)
        out.writerow(("key", "project", "run", "run_name", "kind", "began", "ended", "seconds", "usd"))
        for each in rows:
            times = (_utc(each.began), _utc(each.ended), f"{(each.ended - each.began) / 1000:.3f}")
            out.writerow((each.key, each.project, each.run, each.run_name, each.kind, *times, f"{each.usd:.6f}"))
        echo(table.getvalue(), nl=False)
    else:
        for each in rows:
            used = f"{(each.ended - each.began) / 1000:,.3f} s  {each.usd:.4f} USD"
            echo(f"{_utc(each.ended)}  {each.project}  {each.run}  {each.run_name}  {used}")
        seconds = sum(each.ended - each.began for each in rows) / 1000
        echo(f"{len(rows)} attempts, {seconds:,.3f} s, {sum(each.usd for each in rows):.2f} USD")


def _utc(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _millis(text: str, option: str) -> int:
    if not text:
        return 0
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{option} = '{text}': write a date as 2026-01-31, or a time as 2026-01-31T12:00"
        ) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


@control_app.command("project")
def control_project(
    name: Annotated[str, typer.Argument(help="Name of the project; an existing one is changed.")],
    budget: Annotated[
        float | None, typer.Option(min=0, help="US dollars for all its runs together; 0: no limit. Default: as before.")
    ] = None,
    max_live_runs: Annotated[
        int | None, typer.Option(min=0, help="Runs on their way at a time; 0: no limit. Default: as before.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a project, or change its budget and its number of runs."""
    from tandem.client import Tandem

    with Tandem() as server:
        made = server.put_project(name, budget_usd=budget, max_live_runs=max_live_runs)
    told = f"{made.name}: budget {made.budget_usd:g} USD, spent {made.spent_usd:.2f}, runs {made.max_live_runs}"
    echo(made.model_dump_json(indent=2) if as_json else told)


@key_app.command("new")
def key_new(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="runs:read, runs:write, keys, secrets or admin. Repeatable. Default: both of runs."),
    ] = None,
    project: Annotated[str, typer.Option(help="The only project that it may see. Default: all.")] = "",
    org: Annotated[str, typer.Option(help="Make an org of this name, and the key for it. Default: your own.")] = "",
    days: Annotated[float, typer.Option(min=0, help="Days until it expires; 0: never.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it. It is kept nowhere: it cannot be shown again."""
    from tandem.client import Tandem

    scopes = cast("Any", scope or ["runs:read", "runs:write"])
    expires_at = int((time.time() + days * 86_400) * 1000) if days else 0
    with Tandem() as server:
        org_id = server.make_org(org).id if org else ""
        made = server.make_key(name, scopes, project=project, org=org_id, expires_at=expires_at)
    echo(made.model_dump_json(indent=2) if as_json else made.key)


@key_app.command("list")
def key_list(as_json: AsJson = False) -> None:
    """List the keys of your org, without the keys themselves."""
    from tandem.client import Tandem

    with Tandem() as server:
        found = server.keys()
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    for each in () if as_json else found:
        state = "revoked" if each.revoked_at else "expires" if each.expires_at else ""
        echo(f"{each.id}  {each.name}  {','.join(each.scopes)}  {each.project}  {state}".rstrip())


@key_app.command("revoke")
def key_revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="As `key list` prints it.")]) -> None:
    """Revoke a key: it is refused from now on."""
    from tandem.client import Tandem

    with Tandem() as server:
        echo(f"{server.revoke_key(key_id).id} revoked")


# --- secrets

OfProject = Annotated[str, typer.Option("--project", help="Only this project's runs get it. Default: every project's.")]


@secret_app.command("set")
def secret_set(
    name: Annotated[str, typer.Argument(help="Name of the variable that the trainer gets, HF_TOKEN for example.")],
    project: OfProject = "",
    file: Annotated[
        Path | None, typer.Option(help="File that holds the value. Default: ask for it, or read stdin.")
    ] = None,
) -> None:
    """Make a secret, or give it a new value. A line break at its end is left out."""
    from tandem.client import Tandem

    if file is not None:
        value = file.read_text(encoding="utf-8")
    elif sys.stdin.isatty():
        value = typer.prompt(name, hide_input=True)
    else:
        value = sys.stdin.read()
    with Tandem() as server:
        made = server.set_secret(name, value.removesuffix("\n"), project=project)
    echo(f"{made.name}: value {made.version}")


@secret_app.command("list")
def secret_list(as_json: AsJson = False) -> None:
    """List the secrets of your org, without their values."""
    from tandem.client import Tandem

    with Tandem() as server:
        found = server.secrets()
    if as_json:
        echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    for each in () if as_json else found:
        echo(f"{each.name}  {each.project or 'every project'}  value {each.version}, set by {each.changed_by}")


@secret_app.command("delete")
def secret_delete(
    name: Annotated[str, typer.Argument(help="As `secret list` prints it.")], project: OfProject = ""
) -> None:
    """Delete a secret. Refused while a run on its way needs it."""
    from tandem.client import Tandem

    with Tandem() as server:
        echo(f"{server.delete_secret(name, project=project).name} deleted")
