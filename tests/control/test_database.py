"""The database: what is acknowledged is there, one process writes, and a newer database is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy.orm import Session

from tandem.control.maintenance import upgrade
from tandem.control.migrate import head
from tandem.control.store import FILE, Store
from tandem.control.tables import Base, Org, Revision
from tandem.errors import SpecError, StoreBroken, StoreError, StoreFull, StoreOwned


def add(name: str):
    return lambda session: session.add(Org(id=name, at=0, name=name))


def names(session: Session) -> list[str]:
    return list(session.scalars(sa.select(Org.name).order_by(Org.name)))


def test_a_change_that_raises_is_undone_alone(store: Store):
    def wrong(session: Session) -> None:
        session.add(Org(id="wrong", at=0, name="wrong"))
        session.flush()
        raise ValueError("wrong")

    async def together() -> list[object]:
        changes = [add("a"), wrong, add("b"), add("a"), add("c")]
        return await asyncio.gather(*map(store.write, changes), return_exceptions=True)

    done = asyncio.run(together())
    assert [type(each).__name__ for each in done] == [
        "NoneType",
        "ValueError",
        "NoneType",
        "IntegrityError",
        "NoneType",
    ]
    assert asyncio.run(store.read(names)) == ["a", "b", "c"]


def test_plain_changes_are_undone_alone_too(store: Store):
    insert = sa.text("insert into orgs (id, at, name) values (:name, 0, :name)")

    def adds(name: str) -> Callable[[sa.Connection], object]:
        return lambda connection: connection.execute(insert, {"name": name}) and None

    async def together() -> list[object]:
        changes = [store.write_plain(adds(name)) for name in ("a", "b", "a", "c")]
        return await asyncio.gather(*changes, store.write(add("d")), return_exceptions=True)

    done = asyncio.run(together())
    assert [type(each).__name__ for each in done] == ["NoneType", "NoneType", "IntegrityError", "NoneType", "NoneType"]
    assert asyncio.run(store.read(names)) == ["a", "b", "c", "d"]


def test_what_was_written_is_there_after_a_restart(tmp_path: Path, database: str):
    first = Store(tmp_path, database)
    asyncio.run(first.write(add("a")))
    first.close()
    second = Store(tmp_path, database)
    assert asyncio.run(second.read(names)) == ["a"]
    second.close()


def test_sqlite_waits_for_the_disk_and_only_its_user_reads_it(tmp_path: Path):
    store = Store(tmp_path)
    with store.engine.connect() as connection:
        assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    store.close()


def test_a_second_control_plane_is_refused(store: Store, tmp_path: Path, database: str):
    with pytest.raises(StoreOwned):
        Store(tmp_path / "data", database)
    if database:
        with pytest.raises(StoreOwned, match="another control plane holds this database"):
            Store(tmp_path / "elsewhere", database)


def test_the_migrations_make_the_tables(store: Store):
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def one_of(kind: sa.types.TypeEngine[Any]) -> Any:
    """Return a value that a column of this type can have."""
    values = {sa.JSON: {"a": 1}, sa.LargeBinary: b"a", sa.Boolean: True, sa.Float: 0.5, sa.Integer: 1}
    return next((value for base, value in values.items() if isinstance(kind, base)), "a")


@pytest.mark.slow
def test_rows_of_an_older_release_are_kept_when_its_database_is_upgraded(tmp_path: Path, database: str):
    """From 0005, which knew neither packages nor canaries, with a row in each of its tables."""
    engine = sa.create_engine(database or f"sqlite:///{tmp_path / FILE}")
    config, old = Config(), sa.MetaData()
    config.set_main_option("script_location", "tandem.control:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
        old.reflect(connection)
        there = [each for each in old.sorted_tables if each.name != "alembic_version"]
        for table in there:
            connection.execute(table.insert(), {column.name: one_of(column.type) for column in table.columns})
        before = {table.name: connection.execute(table.select()).mappings().one() for table in there}
    engine.dispose()
    assert upgrade(tmp_path, database) == ("0005", head())
    store = Store(tmp_path, database)
    with store.engine.connect() as connection:
        assert {table.name: connection.execute(table.select()).mappings().one() for table in there} == before
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    row = asyncio.run(store.read(lambda session: session.scalars(sa.select(Revision)).one()))
    assert (row.canary, row.keep_s, row.why, row.counts, row.beside) == (0.0, 0, "", {}, {})
    store.close()


def test_a_newer_database_is_refused_and_left_as_it_is(tmp_path: Path, database: str):
    store = Store(tmp_path, database)
    asyncio.run(store.write(add("a")))
    asyncio.run(store.write(lambda session: session.execute(sa.text("update alembic_version set version_num='9999'"))))
    store.close()
    with pytest.raises(StoreError, match="has revision '9999', and this Tandem knows revisions up to '0008'"):
        Store(tmp_path, database)
    engine = sa.create_engine(database or f"sqlite:///{tmp_path / FILE}")
    with engine.connect() as connection:
        assert connection.execute(sa.text("select version_num, name from alembic_version, orgs")).all() == [
            ("9999", "a")
        ]
    engine.dispose()


def test_another_database_is_refused_by_name(tmp_path: Path):
    with pytest.raises(SpecError, match="--database = 'mysql://here': write postgresql"):
        Store(tmp_path, "mysql://here")


def test_a_full_disk_refuses_changes_until_there_is_room(tmp_path: Path):
    store = Store(tmp_path)

    def limit(pages: int):
        return lambda session: session.connection().exec_driver_sql(f"pragma max_page_count={pages}").scalar()

    def much(session: Session) -> None:
        for number in range(2000):
            session.add(Org(id=f"{number}", at=0, name="x" * 110 + str(number)))

    asyncio.run(store.write(add("a")))
    asyncio.run(store.write(limit(1)))  # as few as there are
    with pytest.raises(StoreFull, match="has no room"):
        asyncio.run(store.write(much))
    asyncio.run(store.write(limit(10_000)))
    asyncio.run(store.write(much))
    assert len(asyncio.run(store.read(names))) == 2001
    store.close()


@pytest.mark.slow
def test_a_lost_connection_to_postgresql_is_made_again_with_its_lock(tmp_path: Path, postgres_url: str):
    store = Store(tmp_path, postgres_url)
    own = asyncio.run(store.write(lambda session: session.scalar(sa.select(sa.func.pg_backend_pid()))))
    engine = sa.create_engine(postgres_url)
    with engine.connect() as connection:
        connection.execute(sa.select(sa.func.pg_terminate_backend(own)))
    with pytest.raises(StoreBroken, match="send it again"):
        asyncio.run(store.write(add("a")))
    asyncio.run(store.write(add("a")))
    assert asyncio.run(store.read(names)) == ["a"]
    with pytest.raises(StoreOwned):
        Store(tmp_path / "elsewhere", postgres_url)
    engine.dispose()
    store.close()
