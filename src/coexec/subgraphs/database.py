"""One connection per operation, one transaction each, and every failure turned into a StoreError with a reason.

Nothing is kept open between operations: a store that is deleted under a live process is simply made anew, a fork
inherits no handle, threads share none, and an idle process holds no lock. That makes a lookup cost about 2 ms, paid
when a subgraph is met for the first time, not in every step.
"""

from __future__ import annotations

import os
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from coexec.advice import how_to_install
from coexec.subgraphs import tables
from coexec.subgraphs.errors import StoreError
from coexec.subgraphs.faults import store_error
from coexec.subgraphs.location import StoreLocation
from coexec.subgraphs.migrations import check_version, migrate, newest_version
from coexec.subgraphs.trust import ensure_private_folder, ensure_trusted_parent

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3
_RETRIED = frozenset({"vanished", "cannot open"})


class Database:
    """The rows of one store."""

    def __init__(self, location: StoreLocation, wait_s: float = 5.0) -> None:
        self.location = location
        self.wait_s = wait_s  # how long an operation waits for another process's write
        self._engine: Engine | None = None  # made twice if two threads are first at once, which harms nothing

    def read(self, action: Callable[[Connection], T], wait_s: float | None = None) -> T:
        """Run `action` in one read transaction. Errors: StoreError; TrustError for a folder that is not private."""
        return self._run(action, write=False, wait_s=wait_s)

    def write(self, action: Callable[[Connection], T], wait_s: float | None = None) -> T:
        """Run `action` in one write transaction, committed if it returns. Errors as :meth:`read`."""
        return self._run(action, write=True, wait_s=wait_s)

    def _run(self, action: Callable[[Connection], T], *, write: bool, wait_s: float | None) -> T:
        try:
            return self._attempt(action, write, wait_s)
        except StoreError as error:
            if error.reason not in _RETRIED:
                raise
        return self._attempt(action, write, wait_s)  # deleted while we were at it: the second time finds it remade

    def _attempt(self, action: Callable[[Connection], T], write: bool, wait_s: float | None) -> T:
        try:
            self._prepare()
            with self.engine().connect() as connection:
                self._set_wait(connection, self.wait_s if wait_s is None else wait_s)
                self._ensure_schema(connection)
                with _begin(connection, write):
                    return action(connection)
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise store_error(error, self.location) from error

    def _prepare(self) -> None:
        ensure_trusted_parent(self.location.folder.parent)
        ensure_private_folder(self.location.folder)
        file = self.location.sqlite_file
        if file is not None and not file.parent.exists():
            file.parent.mkdir(parents=True, exist_ok=True)

    def _ensure_schema(self, connection: Connection) -> None:
        """Every time: the file may be another one than a moment ago, and a newer coexec may have migrated it."""
        present = _recorded_version(connection)
        check_version(present)
        if present < newest_version():
            with _begin(connection, write=True):
                migrate(connection)

    def engine(self) -> Engine:
        """The SQLAlchemy engine, made on first use. Errors: StoreError("no driver" or "bad url")."""
        engine = self._engine or _make_engine(self.location)
        self._engine = engine
        return engine

    def _set_wait(self, connection: Connection, wait_s: float) -> None:
        if connection.dialect.name == "sqlite":
            # Past SQLAlchemy, which would begin a transaction for it.
            raw: Any = connection.connection.dbapi_connection
            raw.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")


def _recorded_version(connection: Connection) -> int:
    # Selecting at once, and not asking first whether the table exists, saves round trips in every operation.
    try:
        with _begin(connection, write=False):
            return max(connection.scalars(select(tables.schema.c.version)).all(), default=0)
    except DBAPIError as error:
        if not _is_missing_table(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the error: a cycle that would keep all callers' values
        return 0


def _is_missing_table(error: DBAPIError) -> bool:
    return "no such table" in str(error.orig) or getattr(error.orig, "sqlstate", "") == "42P01"


def _make_engine(location: StoreLocation) -> Engine:
    file = location.sqlite_file
    try:
        if file is None:
            return create_engine(location.url, poolclass=NullPool, connect_args=_connect_arguments(location.url))
        engine = create_engine(location.url, poolclass=NullPool, creator=lambda: _open_sqlite(file))
    except (ArgumentError, NoSuchModuleError) as error:
        raise StoreError("bad url", f"{error}; try postgresql+psycopg://user@host/name") from error
    except ModuleNotFoundError as error:
        raise StoreError("no driver", f"{error}; {how_to_install('postgresql')}") from error
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _connect_arguments(url: str) -> dict[str, Any]:
    return {"connect_timeout": CONNECT_TIMEOUT_S} if url.startswith("postgresql") else {}


def _open_sqlite(file: Path) -> sqlite3.Connection:
    connection = _open_read_only(file) if _is_read_only_media(file) else _open_writable(file)
    connection.isolation_level = None  # transactions are begun by us: the driver's own begin too late to be IMMEDIATE
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        # NORMAL: a power cut may lose the last transactions, never the database; a killed process loses nothing.
        connection.execute("PRAGMA synchronous = NORMAL")
        _use_wal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers then never wait for a writer. The mode is kept in the file, so a refusal here concerns only the first."""
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise  # any other refusal (locked, read-only, a network file system) leaves the mode as it is


def _is_read_only_media(file: Path) -> bool:
    """A WAL database needs files beside it. Where none can be made and none is, the file alone is the whole truth."""
    return file.exists() and not os.access(file.parent, os.W_OK) and not Path(f"{file}-wal").exists()


def _open_writable(file: Path) -> sqlite3.Connection:
    # The short wait is for the pragmas below; each operation sets its own.
    return sqlite3.connect(file, timeout=0.1, check_same_thread=False)


def _open_read_only(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)


def _begin(connection: Connection, write: bool) -> Any:
    connection.info["immediate"] = write
    return connection.begin()


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer later fails at once when another one has written meanwhile.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.info.get("immediate") else "BEGIN")
