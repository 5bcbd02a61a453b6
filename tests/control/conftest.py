"""A store for each test: on SQLite, and in the slow tier on a real PostgreSQL server as well."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))

from places import Postgres, postgres

from tandem.control.store import Store


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a PostgreSQL server of this session's own."""
    if not postgres().exists():
        pytest.skip("PostgreSQL is not installed: `make install-system` installs it")
    server = Postgres()
    yield server.url
    server.close()


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
