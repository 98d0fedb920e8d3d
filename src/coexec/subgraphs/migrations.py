"""Numbered steps from an empty database to today's tables. A step, once released, is never edited: add the next one.

Every new store runs all of them, so each is exercised by every test. The SQL is the common part of SQLite, PostgreSQL
and their relatives; `{double}` and `{blob}` stand for the two types that are spelled differently.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, inspect, select, text

from coexec.subgraphs import tables
from coexec.subgraphs.errors import StoreError

_ADVISORY_LOCK = 0x636F6578  # any constant of our own: PostgreSQL has one space of these per database


@dataclass(frozen=True, slots=True)
class Migration:
    """One step."""

    version: int
    statements: tuple[str, ...]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        1,
        (
            "CREATE TABLE coexec_subgraph (digest VARCHAR(64) PRIMARY KEY, outline VARCHAR(64) NOT NULL, "
            "text TEXT NOT NULL, n_ops INTEGER NOT NULL, note TEXT NOT NULL, program VARCHAR(64) NOT NULL, "
            "key_id VARCHAR(64) NOT NULL, signature TEXT NOT NULL, "
            "created_s {double} NOT NULL, used_s {double} NOT NULL)",
            "CREATE INDEX coexec_subgraph_outline ON coexec_subgraph (outline)",
            "CREATE TABLE coexec_environment (digest VARCHAR(64) PRIMARY KEY, text TEXT NOT NULL, "
            "created_s {double} NOT NULL)",
            "CREATE TABLE coexec_measurement (id VARCHAR(64) PRIMARY KEY, subgraph VARCHAR(64) NOT NULL, "
            "environment VARCHAR(64) NOT NULL, shape_class VARCHAR(255) NOT NULL, backend VARCHAR(100) NOT NULL, "
            "options TEXT NOT NULL, outcome VARCHAR(20) NOT NULL, detail TEXT NOT NULL, median_s {double}, "
            "spread_s {double}, samples INTEGER NOT NULL, eager_s {double}, compile_s {double}, "
            "measured_s {double} NOT NULL)",
            "CREATE INDEX coexec_measurement_subgraph ON coexec_measurement (subgraph, environment)",
            "CREATE TABLE coexec_decision (subgraph VARCHAR(64) NOT NULL, environment VARCHAR(64) NOT NULL, "
            "shape_class VARCHAR(255) NOT NULL, constants VARCHAR(64) NOT NULL, backend VARCHAR(100) NOT NULL, "
            "options TEXT NOT NULL, artifacts TEXT NOT NULL, speedup {double}, reason TEXT NOT NULL, "
            "decided_s {double} NOT NULL, used_s {double} NOT NULL, checksum VARCHAR(64) NOT NULL, "
            "key_id VARCHAR(64) NOT NULL, signature TEXT NOT NULL, "
            "PRIMARY KEY (subgraph, environment, shape_class, constants))",
            "CREATE TABLE coexec_artifact (digest VARCHAR(64) PRIMARY KEY, size_bytes BIGINT NOT NULL, "
            "created_s {double} NOT NULL, used_s {double} NOT NULL)",
            "CREATE TABLE coexec_artifact_chunk (digest VARCHAR(64) NOT NULL, position INTEGER NOT NULL, "
            "content {blob} NOT NULL, PRIMARY KEY (digest, position))",
        ),
    ),
    Migration(  # how much time is spent in a subgraph, so that the tuner begins where most is to be gained
        2,
        (
            "ALTER TABLE coexec_subgraph ADD COLUMN run_s {double}",
            "ALTER TABLE coexec_subgraph ADD COLUMN runs BIGINT NOT NULL DEFAULT 0",
        ),
    ),
)


def newest_version() -> int:
    """The schema version this coexec reads and writes."""
    return MIGRATIONS[-1].version


def schema_version(connection: Connection) -> int:
    """The database's version, 0 for an empty one."""
    if not inspect(connection).has_table(tables.schema.name):
        return 0
    return connection.scalar(select(func.max(tables.schema.c.version))) or 0


def migrate(connection: Connection) -> None:
    """Apply the missing steps in the caller's write transaction: all or none, by one process at a time.

    Errors: StoreError("newer schema") if a newer coexec has made the database.
    """
    _lock(connection)
    present = schema_version(connection)
    check_version(present)
    if present == 0:
        tables.schema.create(connection, checkfirst=True)
    for migration in MIGRATIONS:
        if migration.version > present:
            _apply(connection, migration)


def check_version(present: int) -> None:
    """Errors: StoreError("newer schema") if `present` is beyond what this code knows."""
    if present > newest_version():
        raise StoreError(
            "newer schema",
            f"the store has schema {present}, this coexec knows up to {newest_version()}; "
            "upgrade coexec, or give this version a store of its own with COEXEC_CACHE_DIR or COEXEC_STORE",
        )


def _lock(connection: Connection) -> None:
    # SQLite's write transaction excludes other writers already (BEGIN IMMEDIATE).
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _apply(connection: Connection, migration: Migration) -> None:
    postgresql = connection.dialect.name == "postgresql"
    types = {"{double}": "DOUBLE PRECISION", "{blob}": "BYTEA" if postgresql else "BLOB"}
    for statement in migration.statements:
        for placeholder, spelled in types.items():
            statement = statement.replace(placeholder, spelled)
        connection.execute(text(statement))
    connection.execute(insert(tables.schema).values(version=migration.version, applied_s=time.time()))
