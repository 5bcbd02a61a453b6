"""A store for each test: on SQLite, and in the slow tier on a real PostgreSQL server as well."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tandem.control.store import Store

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path("/nowhere"))


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a PostgreSQL server of this session's own."""
    if not (BINARIES / "postgres").exists():
        pytest.skip("PostgreSQL is not installed: `make install-system` installs it")
    place = Path(tempfile.mkdtemp(prefix="tandem-postgres-"))  # pytest's own directories are closed to other users
    data, user = place / "data", "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    data.mkdir()
    if user:
        place.chmod(0o755)
        shutil.chown(data, user)
    make = [BINARIES / "initdb", "-A", "trust", "-U", "postgres", "--no-sync", "-D", data]
    subprocess.run(make, user=user, cwd="/", check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ["listen_addresses=127.0.0.1", "fsync=off"]  # no test takes its power away
    command = [BINARIES / "postgres", "-D", data, "-p", str(port), "-k", data, *(f"-c{each}" for each in settings)]
    server = subprocess.Popen(command, user=user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
    try:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        until = time.monotonic() + 60
        while True:
            try:
                engine.connect().close()
                break
            except sa.exc.OperationalError:
                assert time.monotonic() < until, "PostgreSQL did not start"
                time.sleep(0.1)
        engine.dispose()
        yield url
    finally:
        server.send_signal(signal.SIGQUIT)  # it ends at once: it waits for no client, and writes nothing more
        server.wait(timeout=30)
        shutil.rmtree(place)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database; empty for SQLite, which is in the data directory."""
    if request.param == "sqlite":
        return ""
    url = sa.make_url(request.getfixturevalue("postgres_url"))
    name = f"test_{time.monotonic_ns()}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"create database {name}"))
    engine.dispose()
    return url.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def store(tmp_path: Path, database: str) -> Iterator[Store]:
    opened = Store(tmp_path / "data", database)
    yield opened
    opened.close()
