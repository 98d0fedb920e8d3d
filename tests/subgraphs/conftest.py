"""A store of its own for each test, with its own keys; PostgreSQL where the machine has it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from coexec.subgraphs.location import StoreLocation, private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring

ROOT = Path(__file__).resolve().parents[2]
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
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("needs PostgreSQL: Debian's package postgresql, or a URL in COEXEC_TEST_POSTGRESQL")
    # A short path: the name of a Unix socket is limited to about 100 bytes.
    folder = tempfile.mkdtemp(prefix="coexec-pg-")
    try:
        started = _server("start", folder)
        if started.returncode:
            pytest.skip(started.stderr.strip())
        yield started.stdout.strip()
    finally:
        assert _server("stop", folder).returncode == 0


def _server(command: str, folder: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / ".ci" / "postgresql"
    return subprocess.run([script, command, folder], capture_output=True, text=True, timeout=120, check=False)


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
