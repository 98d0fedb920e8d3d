"""From an exception of a driver or of the system to a StoreError: a short reason, and what to do about it."""

from __future__ import annotations

import errno
import sqlite3

from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError

from coexec.subgraphs.errors import StoreError
from coexec.subgraphs.location import StoreLocation

_BY_NAME = (  # prefixes of SQLite's error names, first match wins
    ("SQLITE_READONLY_DBMOVED", "vanished"),
    ("SQLITE_BUSY", "locked"),
    ("SQLITE_LOCKED", "locked"),
    ("SQLITE_READONLY", "read-only"),
    ("SQLITE_FULL", "disk full"),
    ("SQLITE_IOERR", "disk error"),
    ("SQLITE_CORRUPT", "corrupted"),
    ("SQLITE_NOTADB", "corrupted"),
    ("SQLITE_CANTOPEN", "cannot open"),
    ("SQLITE_PERM", "read-only"),
)

_BY_ERRNO = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk full",
    errno.EFBIG: "disk full",
    errno.EROFS: "read-only",
    errno.EACCES: "read-only",
    errno.EPERM: "read-only",
}

_ADVICE = {
    "locked": "another process kept it locked; it will be tried again later",
    "read-only": "nothing can be added to it; set COEXEC_CACHE_DIR to a writable folder",
    "disk full": "free some space, or run `coexec db prune --max-bytes N`",
    "disk error": "check the disk, or set COEXEC_CACHE_DIR to another one",
    "corrupted": "run `coexec db verify --repair`, which sets the damaged file aside and starts a new one",
    "cannot open": "set COEXEC_CACHE_DIR to a writable folder",
    "vanished": "it was deleted; it will be made anew",
    "unreachable": "check that the server of COEXEC_STORE runs and accepts this user",
    "conflict": "another process wrote the same entry at the same moment",
    "database error": "run `coexec db verify`",
}


def store_error(error: Exception, location: StoreLocation) -> StoreError:
    """The StoreError that stands for `error`; a StoreError passes through."""
    if isinstance(error, StoreError):
        return error
    reason = _reason(error)
    where = getattr(error, "filename", None) or location.sqlite_file or _masked(location.url)
    cause = getattr(error, "orig", None) or error
    first_line = next(iter(str(cause).splitlines()), type(cause).__name__)
    return StoreError(reason, f"{where}: {first_line}; {_ADVICE[reason]}")


def _masked(url: str) -> str:
    return make_url(url).render_as_string(hide_password=True)


def _reason(error: Exception) -> str:
    if isinstance(error, IntegrityError):
        return "conflict"
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, OSError):
        return _BY_ERRNO.get(cause.errno or 0, "disk error")
    if isinstance(cause, sqlite3.Error):
        return _sqlite_reason(cause)
    state = getattr(cause, "sqlstate", None)
    if state is not None:
        return _postgresql_reason(str(state))
    # A driver that could not connect at all has no SQLSTATE.
    return "unreachable" if isinstance(error, DBAPIError) else "database error"


def _sqlite_reason(cause: sqlite3.Error) -> str:
    if "no such table" in str(cause):
        return "vanished"
    if "decode to UTF-8" in str(cause):
        return "corrupted"
    name = getattr(cause, "sqlite_errorname", "")
    return next((reason for prefix, reason in _BY_NAME if name.startswith(prefix)), "database error")


def _postgresql_reason(state: str) -> str:
    if state == "42P01":
        return "vanished"
    if state.startswith("53"):
        return "disk full"
    if state in ("25006", "42501"):
        return "read-only"
    if state in ("55P03", "40P01", "57014"):
        return "locked"
    return "unreachable" if state.startswith(("08", "57", "28", "3D")) else "database error"
