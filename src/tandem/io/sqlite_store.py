"""A durable store: SQLite in a directory that one process owns. One thread writes; an fsync covers many changes.

consumes: changes (functions of a connection)   waits for: the disk
produces: their results, once they are on the disk

Changes that arrive while the disk is busy share the next transaction. If a change raises, only that change is undone.
On a full disk the current changes are refused (StoreFull), and nothing is damaged. Any other disk failure ends the
store: after a failed fsync the content of the disk is unknown, so nothing more is acknowledged until a restart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tandem.errors import StoreBroken, StoreError, StoreFull, StoreOwned
from tandem.io import atomic_write

_log = logging.getLogger(__name__)

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

_MOST_AT_ONCE = 512
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Files(Protocol):
    """Files that must be on the disk before the index that names them."""

    def mark(self) -> object: ...
    def sync(self) -> None: ...
    def cut_back(self, mark: Any) -> None: ...
    def sweep(self) -> None: ...


class Durable:
    """The store. `schema`: one SQL script per version; an older database is upgraded, a newer one is refused."""

    def __init__(self, directory: Path, schema: Sequence[str], *, files: Files | None = None) -> None:
        atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)
        self.directory, self._files = directory, files
        self._lock = _own(directory)
        self._broken: Exception | None = None
        try:
            self._connection = _open(directory / "index.sqlite3", schema)
        except BaseException:
            os.close(self._lock)
            raise
        # A second connection, which reads committed data only.
        self._reading = sqlite3.connect(directory / "index.sqlite3", check_same_thread=False, isolation_level=None)
        self._changes: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="durable", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> str:
        """Why nothing is acknowledged any more; empty while the disk works."""
        return str(self._broken or "")

    async def write(self, change: Change[T]) -> T:
        """Write a change; return its result after the fsync. If the caller is cancelled before the change began, it is
        dropped; later it is still written."""
        return await asyncio.wrap_future(self.submit(change))

    def submit(self, change: Change[T]) -> concurrent.futures.Future[T]:
        """Queue a change, for callers without an event loop or that do not wait."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._broken is not None:
            future.set_exception(self._broken)
        else:
            self._changes.put(_PendingWrite(change, future))
        return future

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read committed data at once, on the caller's thread: for short queries with an index, and for recovery. One
        thread at a time may call this."""
        return self._reading.execute(sql, values).fetchall()

    def close(self) -> None:
        """Finish all submitted changes, then release the directory."""
        if self._thread.is_alive():
            self._changes.put(None)
            self._thread.join()
        if self._lock >= 0:
            self._reading.close()
            self._connection.close()
            os.close(self._lock)
            self._lock = -1

    # --- the writer's thread

    def _work(self) -> None:
        for batch in batches(self._changes, _MOST_AT_ONCE):
            self._commit(batch)

    def _commit(self, batch: list[_PendingWrite]) -> None:
        if self._broken is not None:
            return _fail(batch, self._broken)
        mark = self._files.mark() if self._files else None
        batch = [each for each in batch if each.future.set_running_or_notify_cancel()]
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            done = [each for each in batch if self._apply(each)]
            if self._files:
                self._files.sync()
            self._connection.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            return _fail(batch, self._undo(error, mark))
        for each in done:
            each.future.set_result(each.result)
        if self._files:
            self._files.sweep()

    def _apply(self, waiting: _PendingWrite) -> bool:
        """Run a change. Return False if it raised: then it was undone, and its caller gets the error."""
        mark = self._files.mark() if self._files else None
        self._connection.execute("SAVEPOINT change")
        try:
            waiting.result = waiting.change(self._connection)
        except (OSError, sqlite3.Error) as error:
            if not _no_room(error) or not self._connection.in_transaction:
                raise
            problem: Exception = StoreFull(_full(self.directory, error))
        except Exception as error:  # noqa: BLE001 - the caller's own failure, which is handed back to it
            problem = error
        else:
            self._connection.execute("RELEASE change")
            return True
        self._connection.execute("ROLLBACK TO change")
        self._connection.execute("RELEASE change")
        if self._files:
            self._files.cut_back(mark)
        waiting.future.set_exception(problem)
        return False

    def _undo(self, error: Exception, mark: Any) -> StoreError:
        """Undo the transaction; return the error for its callers."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if self._files:
                self._files.cut_back(mark)
            if isinstance(error, sqlite3.Error) and _no_room(error):
                return StoreFull(_full(self.directory, error))
        except (OSError, sqlite3.Error) as worse:
            error = worse
        self._broken = StoreBroken(
            f"{self.directory}: {type(error).__name__}: {error}; nothing more is acknowledged: repair the disk and "
            "restart the service, which reads what was acknowledged"
        )
        _log.critical("%s", self._broken)
        return self._broken


class _PendingWrite:
    __slots__ = ("change", "future", "result")

    def __init__(self, change: Change[Any], future: concurrent.futures.Future[Any]) -> None:
        self.change, self.future, self.result = change, future, None


def batches(waiting: queue.SimpleQueue[T | None], most: int) -> Generator[list[T]]:
    """Yield what waits, at most `most` at a time and at least one, until a None comes."""
    while (first := waiting.get()) is not None:
        batch, last = [first], False
        while len(batch) < most and not waiting.empty():
            if (more := waiting.get()) is None:
                last = True
                break
            batch.append(more)
        yield batch
        if last:
            return


def _fail(batch: Sequence[_PendingWrite], error: Exception) -> None:
    for each in batch:
        if not each.future.done():
            each.future.set_exception(error)


@contextmanager
def owned(directory: Path) -> Generator[None]:
    """Hold a directory without opening a store in it; StoreOwned if another process holds it."""
    atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)
    lock = _own(directory)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def read_only(directory: Path) -> Generator[sqlite3.Connection]:
    """Yield a connection that reads a store, even while another process owns it."""
    place = (directory / "index.sqlite3").resolve()
    with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def _own(directory: Path) -> int:
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise StoreOwned(
            f"{directory} belongs to process {owner}, which is alive; end it first, or name another --data-dir"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _open(path: Path, schema: Sequence[str]) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with suppress(FileNotFoundError):
            file.chmod(0o600)  # earlier releases used the umask; SQLite gives its other files the same mode
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > len(schema):
        connection.close()
        raise StoreError(
            f"{path} has schema version {found}, and this Tandem knows {len(schema)}; use the newer Tandem that made it"
        )
    for version in range(found, len(schema)):
        connection.executescript(f"BEGIN; {schema[version]}; PRAGMA user_version={version + 1}; COMMIT;")
    return connection


def _no_room(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def _full(directory: Path, error: Exception) -> str:
    return f"{directory}: no room ({error}); free some space, and send it again: nothing was stored"
