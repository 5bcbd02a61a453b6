"""`tandem dashboard`: the runs of a directory in a browser, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import Host, Insecure, Port, ReadyFile, echo

_HOME = Path(".tandem") / "dashboard"


def dashboard(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory that holds runs.")] = Path("runs"),
    host: Host = "127.0.0.1",
    port: Port = 8800,
    data_dir: Annotated[Path, typer.Option(help="Directory for the token.")] = _HOME,
    browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
) -> None:
    """Show the runs of a directory in a browser: live curves, answers, the proof of the weights, comparisons. It only
    reads. The printed address holds the token: it lets others read the runs."""
    from tandem.io.extras import require_extra

    require_extra("train", "fastapi", "uvicorn")
    import webbrowser

    from tandem.dashboard.service import dashboard_service
    from tandem.errors import RunError
    from tandem.serve.http.run import Listen, Server
    from tandem.serve.http.service import create_app

    if not directory.is_dir():
        raise RunError(f"{directory}: is not a directory; name the one that holds your runs, or train first")
    listen = Listen(data_dir, host, port, ready_file, insecure)
    token = listen.token()

    def tell(_: str) -> None:
        address = f"{served.url}/#token={token}"
        echo(f"{directory} at {address}")
        if browser:
            webbrowser.open(address)

    served = Server(create_app(dashboard_service(directory), token=token, hosts=listen.hosts), listen, tell)
    served.run()
