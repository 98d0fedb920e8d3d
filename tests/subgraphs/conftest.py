"""A store of its own for each test, with its own keys; PostgreSQL where the machine has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from coexec.subgraphs.location import StoreLocation, private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring

MakeStore = Callable[..., Store]


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys")


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    return private_location(tmp_path / "store")


@pytest.fixture
def store(location: StoreLocation, keyring: Keyring) -> Store:
    """A strict store of one user: a test sees every error."""
    return Store(location, strict=True, keyring=keyring)


@pytest.fixture
def serving(location: StoreLocation, keyring: Keyring) -> Store:
    """The same store as a server sees it: no error, only counts."""
    return Store(location, keyring=keyring, wait_s=0.2)


@pytest.fixture
def shared(tmp_path: Path, keyring: Keyring) -> Store:
    """A team's store, seen by the user of `keyring`."""
    return Store(shared_location(f"sqlite:///{tmp_path}/team.sqlite", tmp_path / "mine"), strict=True, keyring=keyring)


@pytest.fixture
def teammate(tmp_path: Path) -> Store:
    """The team's store of `shared`, seen by another user with other keys and another cache."""
    location = shared_location(f"sqlite:///{tmp_path}/team.sqlite", tmp_path / "theirs")
    return Store(location, strict=True, keyring=Keyring(tmp_path / "their-keys"))


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """URL of a running server: COEXEC_TEST_POSTGRESQL, or one that is started here and ends with the tests."""
    given = os.environ.get("COEXEC_TEST_POSTGRESQL")
    if given:
        yield given
        return
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not binaries:
        pytest.skip("needs PostgreSQL: Debian's package postgresql, or a URL in COEXEC_TEST_POSTGRESQL")
    # A short path: the name of a Unix socket is limited to about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="coexec-pg-"))
    user = _server_user(folder)
    try:
        yield _start_server(binaries[-1], folder, user)
    finally:
        _as_user([binaries[-1] / "pg_ctl", "-D", folder / "data", "-m", "immediate", "stop"], user, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _server_user(folder: Path) -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    shutil.chown(folder, user="postgres")
    return "postgres"


def _start_server(binaries: Path, folder: Path, user: str | None) -> str:
    _as_user([binaries / "initdb", "-D", folder / "data", "-U", "tester", "-A", "trust", "--no-sync"], user)
    options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=40"
    log = folder / "log"
    _as_user([binaries / "pg_ctl", "-D", folder / "data", "-o", options, "-l", log, "-w", "start"], user)
    return f"postgresql+psycopg://tester@/postgres?host={folder}"


def _as_user(command: list[object], user: str | None, check: bool = True) -> None:
    words = [str(word) for word in command]
    subprocess.run(words, user=user, check=check, cwd="/", capture_output=True, timeout=120)


@pytest.fixture
def postgresql_url(postgresql_server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of its own on the server."""
    pytest.importorskip("psycopg")
    name = f"coexec_{os.getpid()}_{abs(hash(request.node.nodeid)) % 10**9}"
    admin = create_engine(postgresql_server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield postgresql_server.replace("/postgres?", f"/{name}?")
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
