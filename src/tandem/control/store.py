"""The database of the control plane, SQLite or PostgreSQL. One thread writes; one commit covers many changes.

consumes: changes (functions of a Session)   waits for: the database's disk
produces: their results, once they are committed

A change that raises is undone alone: the batch is undone, and done again with a savepoint for each change. So a change
may be called twice, and must leave nothing behind but rows. One process at a time owns the database: the data
directory is locked, and on PostgreSQL the writing connection also holds an advisory lock, which ends with it. So a
process that lost its connection can write nothing until it holds the lock again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.orm import Session

from tandem.control.migrate import migrate
from tandem.errors import SpecError, StoreBroken, StoreError, StoreFull, StoreOwned
from tandem.io.extras import require_extra
from tandem.io.sqlite_store import batches, owned

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_AT_ONCE = 256
_LOCK = 0x74616E64656D  # of PostgreSQL's advisory locks; the database's name is part of the lock by itself
_FULL = {"53100"}  # PostgreSQL: disk_full
FILE = "control.sqlite3"


@dataclass
class _Write:
    change: Callable[[Any], Any]
    plain: bool = False
    """It takes the connection, not a session."""
    waiter: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    result: Any = None
    error: Exception | None = None


class Store:
    """The store. `url`: of a PostgreSQL database; empty: SQLite in the data directory."""

    def __init__(self, directory: Path, url: str = "") -> None:
        if url and not url.startswith("postgresql"):
            raise SpecError(
                f"--database = '{url}': write postgresql+psycopg://USER@HOST/NAME, or leave it out for SQLite"
            )
        if url:
            require_extra("postgres", "psycopg")
        self._held = ExitStack()
        self._held.enter_context(owned(directory))
        try:
            if not url:
                os.close(os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.engine = _engine(url or f"sqlite:///{directory / FILE}")
            self._held.callback(self.engine.dispose)
            self._connection: sa.Connection | None = self._connect()
            migrate(self._connection)
        except BaseException:
            self._drop()
            self._held.close()
            raise
        self._broken: StoreError | None = None
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="control-store", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> str:
        """Why nothing is acknowledged any more; empty while the database works."""
        return str(self._broken or "")

    async def write(self, change: Callable[[Session], T]) -> T:
        """Make a change; return its result once it is committed. A change may run after its caller was cancelled."""
        return await self._written(_Write(change))

    async def write_plain(self, change: Callable[[sa.Connection], T]) -> T:
        """The same for a change that is made all the time, without a session: one costs more than its statements."""
        return await self._written(_Write(change, plain=True))

    async def read(self, query: Callable[[Session], T]) -> T:
        """Ask a question about committed data, on a thread."""
        return await asyncio.to_thread(self._ask, query)

    def close(self) -> None:
        """Finish all changes, then release the database."""
        if self._thread.is_alive():
            self._writes.put(None)
            self._thread.join()
        self._drop()
        self._held.close()

    async def _written(self, write: _Write) -> Any:
        self._writes.put(write)
        return await write.waiter

    def _ask(self, query: Callable[[Session], T]) -> T:
        try:
            with Session(self.engine, expire_on_commit=False) as session:
                return query(session)
        except exc.OperationalError as error:
            raise StoreBroken(f"the database does not answer: {error.orig}") from error

    # --- the writer's thread

    def _work(self) -> None:
        for batch in batches(self._writes, _MOST_AT_ONCE):
            self._commit(batch)

    def _commit(self, batch: Sequence[_Write]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            if self._connection is None:
                self._connection = self._connect()
            try:
                with self._connection.begin():
                    for each in batch:
                        self._apply(self._connection, each)
            except exc.OperationalError:
                raise  # the database's own failure
            except Exception:  # noqa: BLE001 - of one of the changes; which, the savepoints show
                with self._connection.begin():
                    for each in batch:
                        self._apply_alone(self._connection, each)
        except (StoreError, exc.DBAPIError, OSError) as error:
            refusal = self._undone(error)
            for each in batch:
                each.error = each.error or refusal
        _tell(batch)

    def _apply(self, connection: sa.Connection, write: _Write) -> None:
        if write.plain:
            write.result = write.change(connection)
            return
        with Session(connection, join_transaction_mode="rollback_only", expire_on_commit=False) as session:
            write.result = write.change(session)
            session.commit()  # flushes; the transaction is the batch's

    def _apply_alone(self, connection: sa.Connection, write: _Write) -> None:
        """Make a change. If it raises, it is undone, and its caller gets the error."""
        try:
            if write.plain:
                with connection.begin_nested():
                    write.result = write.change(connection)
                return
            with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as session:
                write.result = write.change(session)
                session.commit()  # releases the savepoint
        except exc.OperationalError:
            raise  # the database's own failure, which ends the whole transaction
        except Exception as error:  # noqa: BLE001 - the caller's own failure, which is handed back to it
            write.error = error

    def _undone(self, error: Exception) -> StoreError:
        """Return the error for the callers of a transaction that was undone."""
        if isinstance(error, StoreError):
            return error
        _log.error("the control plane's database: %s", error)
        if _no_room(error):
            return StoreFull(f"the database has no room ({error}); free some space, and send it again")
        self._drop()
        told = StoreBroken(f"the database failed: {error}; nothing was written, send it again")
        if self.engine.dialect.name == "sqlite":  # after a failed fsync, what the disk holds is unknown
            self._broken = StoreBroken(f"{told}; repair the disk and restart the control plane")
        return self._broken or told

    def _connect(self) -> sa.Connection:
        connection = self.engine.connect()
        if self.engine.dialect.name == "postgresql":
            held = connection.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK))).scalar_one()
            connection.commit()  # the lock is the session's, not the transaction's
            if not held:
                connection.close()
                raise StoreOwned("another control plane holds this database; end it first, or name another --database")
        return connection

    def _drop(self) -> None:
        connection, self._connection = getattr(self, "_connection", None), None
        if connection is not None:
            with suppress(exc.DBAPIError):
                connection.invalidate()  # not back into the pool: the lock must end with it
                connection.close()


def _tell(batch: Sequence[_Write]) -> None:
    """Answer the callers, with one call into each event loop."""
    for loop in {each.waiter.get_loop() for each in batch}:
        with suppress(RuntimeError):  # the loop was closed, and its callers are gone
            loop.call_soon_threadsafe(_answer, [each for each in batch if each.waiter.get_loop() is loop])


def _answer(batch: Sequence[_Write]) -> None:
    for each in batch:
        if each.waiter.done():
            continue  # its caller was cancelled
        if each.error is not None:
            each.waiter.set_exception(each.error)
        else:
            each.waiter.set_result(each.result)


def _engine(url: str) -> sa.Engine:
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_pre_ping=True, hide_parameters=True)  # errors are logged, and told to callers
    engine = sa.create_engine(url, connect_args={"timeout": 30}, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def settings(connection: sqlite3.Connection, _: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # the driver's own BEGIN comes too late for savepoints
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        driver = connection.connection.driver_connection
        assert driver is not None
        try:
            driver.execute("BEGIN")  # through SQLAlchemy it takes as long as a statement
        except sqlite3.Error as error:
            raise exc.OperationalError("BEGIN", None, error) from error

    return engine


def _no_room(error: BaseException | None) -> bool:
    """Return whether the disk is full. SQLite then undoes the whole transaction by itself, so undoing the savepoint
    fails as well: the first error is the context of the last."""
    while error is not None:
        origin = getattr(error, "orig", None)
        if getattr(origin, "sqlstate", "") in _FULL or (
            isinstance(origin, sqlite3.Error) and origin.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
