"""The same store on PostgreSQL, for real."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from coexec.subgraphs import tables
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.location import shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.transfer import export_store, import_store
from coexec.subgraphs.trust import Keyring
from tests.subgraphs.samples import HERE, decision, elsewhere, key, measurement, tuned


@pytest.fixture
def team(postgresql_url: str, tmp_path: Path, keyring: Keyring) -> Store:
    return Store(shared_location(postgresql_url, tmp_path / "mine"), strict=True, keyring=keyring)


def test_it_keeps_and_finds_everything(team: Store, postgresql_url: str, tmp_path: Path, keyring: Keyring) -> None:
    content = bytes(range(256)) * 40_000  # three chunks
    made = tuned(
        team, key(), content, options={"a": [1, 2.5, None, "é"]}, speedup=1.1 / 3.3, reason="nul \0 and \udcff"
    )
    bad = measurement(key(), "tvm", outcome=Outcome.CRASH, median_s=None, detail="SIGSEGV \0", id="1")
    team.record_measurement(bad, HERE)
    team.record_measurement(bad, HERE)
    team.put_subgraph(key("gelu"), program=b"graph")
    other = Store(shared_location(postgresql_url, tmp_path / "theirs"), strict=True, keyring=keyring)
    assert other.lookup(key(), HERE) == made
    folder = other.checkout(made)
    assert folder is not None
    assert (folder / "model.so").read_bytes() == content
    assert [m.outcome for m in other.measurements(key().digest)] == [Outcome.CRASH]
    assert other.program(key("gelu").digest) is not None
    assert [info.digest for info in other.subgraphs(undecided_in=HERE)] == [key("gelu").digest]
    assert other.subgraph(key().digest[:8]) is not None
    assert "torch" in other.explain_miss(key(), elsewhere(torch="2.8"))
    assert other.explain_miss(key(scale=7.0), HERE).startswith("nearest graph")


def test_a_later_decision_replaces_the_earlier(team: Store) -> None:
    tuned(team, key())
    team.decide(decision(key(), "eager"), HERE)
    assert team.lookup(key(), HERE).backend == "eager"  # type: ignore[union-attr]
    assert len(team.decisions()) == 1


def test_it_is_pruned_and_verified(team: Store) -> None:
    made = tuned(team, key(), b"x" * 100)
    assert team.verify().ok  # type: ignore[union-attr]
    assert team.prune(unused_s=0.0).subgraphs == 1  # type: ignore[union-attr]
    tuned(team, key(), b"x" * 100)
    assert team.prune(max_bytes=0).artifact_bytes == 100  # type: ignore[union-attr]
    assert team.lookup(key(), HERE).artifacts == ()  # type: ignore[union-attr]
    assert made.artifacts


def test_a_strangers_decision_is_refused(team: Store, postgresql_url: str, tmp_path: Path) -> None:
    tuned(team, key())
    stranger = Store(shared_location(postgresql_url, tmp_path / "s"), strict=True, keyring=Keyring(tmp_path / "other"))
    with pytest.raises(TrustError, match="not trusted"):
        stranger.lookup(key(), HERE)


def test_it_goes_into_a_file_and_back(team: Store, store: Store, tmp_path: Path) -> None:
    made = tuned(team, key())
    export_store(team, tmp_path / "export")
    import_store(store, tmp_path / "export")
    assert store.lookup(key(), HERE) == made


def test_its_tables_are_those_the_code_uses(team: Store) -> None:
    team.lookup(key(), HERE)

    def columns(connection: object) -> dict[str, set[str]]:
        inspector = inspect(connection)
        return {name: {c["name"] for c in inspector.get_columns(name)} for name in inspector.get_table_names()}

    expected = {name: {c.name for c in table.columns} for name, table in tables.metadata.tables.items()}
    assert team._open()[0].read(columns) == expected


def test_connections_that_the_server_ends_are_made_anew(team: Store, postgresql_url: str) -> None:
    made = tuned(team, key())
    engine = create_engine(postgresql_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        )
    engine.dispose()
    assert team.lookup(key(), HERE) == made


def test_a_newer_schema_is_left_alone(team: Store, postgresql_url: str) -> None:
    tuned(team, key())
    engine = create_engine(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO coexec_schema VALUES (99, 0)"))
    engine.dispose()
    with pytest.raises(StoreError) as caught:
        team.lookup(key(), HERE)
    assert caught.value.reason == "newer schema"


def test_a_user_without_rights_is_a_counted_miss(
    team: Store, postgresql_url: str, tmp_path: Path, keyring: Keyring
) -> None:
    tuned(team, key())
    engine = create_engine(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS reader"))
        connection.execute(text("CREATE ROLE reader LOGIN"))
        connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"))
    location = shared_location(postgresql_url.replace("tester@", "reader@"), tmp_path / "reader")
    serving = Store(location, keyring=keyring)
    assert serving.lookup(key(), HERE) is not None
    assert not serving.decide(decision(key(), "eager"), HERE)
    assert serving.counters() == {"hit": 1, "fault.read-only": 1}
    with engine.begin() as connection:
        connection.execute(text("DROP OWNED BY reader"))
        connection.execute(text("DROP ROLE reader"))
    engine.dispose()


def test_a_database_that_does_not_exist_is_a_counted_miss(postgresql_url: str, tmp_path: Path) -> None:
    serving = Store(shared_location(postgresql_url.replace("/coexec_", "/absent_"), tmp_path / "x"))
    assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {"fault.unreachable": 1}
