"""Commands for packages of environments on a control server: env push, env yank, env verify, env list --index."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tandem.cli.options import AsJson, echo

if TYPE_CHECKING:
    from tandem.shapes.packages import PackageInfo, PackageVersionInfo

_BUILD_S, _WORKERS_GIB = 300.0, 4.0
_NOT_BUILT = ("build", "dist", "*.egg-info", "__pycache__", ".git", ".venv", "runs")
"""Of a project's directory: what earlier builds left, or what is no part of it. It is built from a copy."""
_DATE = "315532800"  # the first of January 1980, the first that a zip file can have


def env_list(
    index: Annotated[
        bool, typer.Option("--index", help="List the packages of the control server's index, and their versions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the environments that have a name; your own are a file or a module: `tandem env new NAME`."""
    if index:
        return _list_index(as_json)
    from tandem.env.catalog import list_environments

    found = list_environments()
    if as_json:
        return echo(json.dumps(found, indent=2))
    width = max(len(each["name"]) for each in found) + 2
    for each in found:
        echo(f"{each['name']:<{width}}{each['about']}")


def _list_index(as_json: bool) -> None:
    from tandem.client import Tandem

    with Tandem() as server:
        found = server.environments()
    if as_json:
        return echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    for each in found:
        _show(each)


def _show(package: PackageInfo) -> None:
    for each in package.versions:
        yanked = f"  yanked{f': {each.yanked_why}' if each.yanked_why else ''}" if each.yanked_at else ""
        echo(f"{each.title}=={each.version}  {each.size:,} bytes  sha256 {each.sha256[:12]}  {each.summary}{yanked}")


def push(
    source: Annotated[
        Path, typer.Argument(metavar="DIST.whl|DIR", help="A wheel, or a project's directory to build one of.")
    ],
    project: Annotated[str, typer.Option(help="Only this project sees a new package. Default: all of your org.")] = "",
    rate: Annotated[
        Path | None, typer.Option(help="What `tandem env check --json` printed, for the provenance. Default: none.")
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not load it here, in a sandbox, before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push an environment to the control server's index, as a version that never changes."""
    from tandem.client import Tandem

    checks: dict[str, Any] = {} if rate is None else _rate(rate)
    with Tandem() as server, _wheel_of(source) as (wheel, build):
        if not no_check:
            checks |= _loaded(wheel)
        done = server.push_environment(wheel, project=project, build=build, checks=checks)
    if as_json:
        return echo(done.model_dump_json(indent=2))
    echo(f"{done.title}=={done.version}: pushed, sha256 {done.sha256}")
    _tell_use(done, server.url)


def _tell_use(done: PackageVersionInfo, url: str) -> None:
    echo(f'in a spec:  [environment]  name = "{done.title}=={done.version}"')
    echo(f"elsewhere:  pip install --index-url {url.replace('://', '://KEY_NAME:KEY@', 1)}/simple/ {done.id}")


def yank(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME==VERSION", help="The version.")],
    why: Annotated[str, typer.Option(help="A line for those who meet it. Default: none.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Put it back.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a version out of what is chosen by default. Runs that have it keep it; it is never deleted."""
    from tandem.client import Tandem

    with Tandem() as server:
        done = server.yank_environment(name, why=why, undo=undo)
    state = "yanked" if done.yanked_at else "not yanked"
    echo(done.model_dump_json(indent=2) if as_json else f"{done.title}=={done.version}: {state}")


def verify(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME==VERSION", help="The version.")],
    key: Annotated[
        str, typer.Option(help="The server's signing key, or a file with it. Default: as `tandem login` kept it.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a version: the bytes, each file against RECORD, and who pushed it, by the server's signature."""
    from tandem.client import Tandem

    if key and Path(key).is_file():
        key = Path(key).read_text(encoding="ascii").strip()
    with Tandem() as server:
        found = server.verify_environment(name, signing_key=key)
    if as_json:
        return echo(json.dumps(found.row(), indent=2))
    told = found.provenance
    echo(f"{found.package}=={found.version}{'  (yanked)' if found.yanked else ''}")
    echo(f"bytes       sha256 {found.sha256}, as the index says")
    echo(f"RECORD      {found.files} files of its code, each with its hash")
    echo(f"signature   of the server's key {found.signed_by[:16]}")
    who = cast("dict[str, str]", told.get("pushed_by") or {})
    echo(f"pushed by   key {who.get('key', '')} of {who.get('org', '')}")
    for part in ("build", "checks"):
        row = cast("dict[str, Any]", told.get(part) or {})
        echo(f"{part:<12}{', '.join(f'{name} {value}' for name, value in row.items()) or 'nothing told'}")


# --- before a push


@contextmanager
def _wheel_of(source: Path) -> Generator[tuple[Path, dict[str, str]]]:
    """Yield a wheel, and how it was made: of a project's directory it is built, without the network."""
    made = {"python": platform.python_version()}
    if not source.is_dir():
        yield source, {**made, "from": "a wheel"}
        return
    from tandem.errors import SpecError

    if not (source / "pyproject.toml").exists():
        raise SpecError(f"{source}: has no pyproject.toml; docs/packages.md shows the one that it needs")
    with tempfile.TemporaryDirectory(prefix="tandem-") as home:
        place, copy = Path(home) / "wheels", Path(home) / "source"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*_NOT_BUILT), symlinks=True)
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-I", "-m", "pip", "wheel", *options, "--wheel-dir", str(place), str(copy)]
        env = {"SOURCE_DATE_EPOCH": _DATE, **os.environ}  # the same files make the same wheel
        told = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False, env=env)
        built = sorted(place.glob("*.whl"))
        if told.returncode or len(built) != 1:
            last = "\n  ".join(told.stderr.strip().splitlines()[-4:])
            raise SpecError(f"{source}: `pip wheel --no-deps --no-build-isolation` made no wheel of it:\n  {last}")
        yield built[0], {**made, "from": "a directory", "tool": "pip wheel", **_commit_of(source)}


def _commit_of(source: Path) -> dict[str, str]:
    """Return the commit of the directory, if it is one of git's, and whether it was changed since."""
    try:
        ask = ["git", "-C", str(source)]
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run(
            [*ask, "status", "--porcelain", "--", "."], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.stdout.strip()[:64], "changed since": "yes" if changed.stdout.strip() else "no"}


def _loaded(wheel: Path) -> dict[str, Any]:
    """Load the environment in a sandbox, as a run does; return what was found. It raises what a run would."""
    from tandem.env.sandbox.outside import Sandbox
    from tandem.rollout.workers.forkserver_client import ForkServerClient, Order
    from tandem.runs.environment_packages import install_kept, keep_wheel

    with tempfile.TemporaryDirectory(prefix="tandem-") as place:
        name = keep_wheel(wheel, Path(place) / "packages")
        installed = install_kept(Path(place) / "packages", [name])
        order = Order(
            name, memory_bytes=int(_WORKERS_GIB * 2**30), sandbox=Sandbox(read=(str(installed.site),)),
            installed=installed,
        )  # fmt: skip
        loaded = ForkServerClient(order)
        try:
            counts = {f"{split} tasks": len(loaded.tasks(split)) for split in ("train", "eval")}
            return {"loaded in": "bwrap", **counts, "demonstrates": loaded.loaded.demonstrates}
        finally:
            loaded.close()


def _rate(path: Path) -> dict[str, Any]:
    """Return the plain values of what `tandem env check --json` printed."""
    from tandem.errors import SpecError

    try:
        row: Any = json.loads(path.read_text(encoding="utf-8"))
        return {
            f"env check {name}": value if not isinstance(value, str) else value[:200]
            for name, value in row.items()
            if isinstance(value, int | float | str) and str(value).isprintable() and str(value).isascii()
        }
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(f"--rate = '{path}': is not what `tandem env check --json` printed ({error})") from None
