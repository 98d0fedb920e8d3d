"""Where the store is: the database's URL, the folder of its files, and whether others can write to it.

Read from the settings at each use: a cache folder that changes at run time (pytorch issue 167725) takes effect at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from coexec import config
from coexec.subgraphs.errors import StoreError

FOLDER = "subgraphs"
DATABASE = "store.sqlite"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store's place."""

    url: str  # SQLAlchemy URL
    folder: Path  # private folder of this user: artifacts, and the SQLite file unless the URL names another
    shared: bool  # other people can write the database: decisions and artifacts count with a trusted signature only

    @property
    def sqlite_file(self) -> Path | None:
        """The database file, None for a server or an in-memory database."""
        return _sqlite_file(self.url)


@functools.lru_cache(maxsize=64)
def _sqlite_file(text: str) -> Path | None:
    url = make_url(text)
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def current_location() -> StoreLocation:
    """The location that `COEXEC_STORE` and `COEXEC_CACHE_DIR` name now.

    Errors: StoreError("bad url") for a `COEXEC_STORE` that is no SQLAlchemy URL.
    """
    folder = config.cache_dir() / FOLDER
    url = config.settings().store
    return shared_location(url, folder) if url else private_location(folder)


def private_location(folder: Path) -> StoreLocation:
    """A store of one user: SQLite and artifacts in one folder with mode 0700."""
    return StoreLocation(f"sqlite:///{folder / DATABASE}", folder, shared=False)


def shared_location(url: str, folder: Path) -> StoreLocation:
    """A store by URL; `folder` keeps this user's verified copies of its artifacts.

    An explicit URL is shared even if it happens to name a private file: who sets it means to share, and a rule that
    depends on a file mode is one that people cannot predict.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            "bad url", f"COEXEC_STORE={url!r} is no SQLAlchemy URL ({error}); try postgresql+psycopg://user@host/name"
        ) from error
    if parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:":
        parsed = parsed.set(database=str(Path(parsed.database).expanduser().absolute()))
    return StoreLocation(parsed.render_as_string(hide_password=False), folder, shared=True)
