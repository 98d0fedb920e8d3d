"""Between the frozen data of `entries` and table rows, and the few queries that reading needs. Nothing here decides."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from coexec.subgraphs import tables
from coexec.subgraphs.entries import ArtifactRef, Decision, Measurement, Outcome, SubgraphInfo, canonical_json
from coexec.subgraphs.errors import StoreError
from coexec.subgraphs.key import SubgraphKey
from coexec.subgraphs.trust import Signature

DAY_S = 86400.0
"""`used_s` is kept to the day: a lookup that wrote every time would make readers wait for each other."""


def insert_new(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert unless the primary key exists; returns whether the row is new."""
    dialect = _INSERTS.get(connection.dialect.name)
    if dialect is None:
        return _insert_in_savepoint(connection, table, values)
    statement = dialect(table).values(**values).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
    return connection.execute(statement).rowcount == 1


_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def _insert_in_savepoint(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """For other dialects. Not for SQLite: a full disk ends its transaction, and the savepoint's error hides that."""
    try:
        with connection.begin_nested():
            connection.execute(insert(table).values(**values))
    except IntegrityError:
        if connection.execute(select(table).where(primary_key(table, values))).first() is None:
            raise  # not the key: a broken row is a bug of ours, not a race
        return False
    return True


def upsert(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Insert or overwrite by primary key. The loser of a race overwrites: the last writer wins, rows stay whole."""
    if not insert_new(connection, table, values):
        connection.execute(update(table).where(primary_key(table, values)).values(**values))


def primary_key(table: Table, values: Mapping[str, Any]) -> ColumnElement[bool]:
    """The condition that picks the row of `values`."""
    return and_(*(column == values[column.name] for column in table.primary_key.columns))


def storable(text: str) -> str:
    """`text` without what databases refuse: NUL (PostgreSQL) and lone surrogates, both seen in compilers' output."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def subgraph_row(key: SubgraphKey, note: str) -> dict[str, Any]:
    """The row of a subgraph without its program."""
    identity = {"digest": key.digest, "outline": key.outline, "text": key.text, "n_ops": key.n_ops}
    now = time.time()
    return identity | {"note": storable(note), "created_s": now, "used_s": now}


def put_subgraph(connection: Connection, row: Mapping[str, Any]) -> bool:
    """Insert the row; a known one is marked as used, and gets the program if it has none. Returns True."""
    s = tables.subgraph
    if not insert_new(connection, s, row):
        known = s.c.digest == row["digest"]
        connection.execute(update(s).where(known).values(used_s=row["used_s"]))
        if row["program"]:
            program = {name: row[name] for name in ("program", "key_id", "signature")}
            connection.execute(update(s).where(known, s.c.program == "").values(**program))
    return True


def note_runs(connection: Connection, digest: str, run_s: float, runs: int) -> bool:
    """So many more runs, of so many seconds each; returns whether the subgraph is stored."""
    s = tables.subgraph
    changed = update(s).where(s.c.digest == digest).values(run_s=run_s, runs=s.c.runs + runs)
    return connection.execute(changed).rowcount == 1


def decision_row(decision: Decision) -> dict[str, Any]:
    """The row of a decision without its signature."""
    statement = decision.statement()
    fields = ("subgraph", "environment", "shape_class", "constants", "backend", "speedup", "reason", "decided_s")
    return {
        **{name: getattr(decision, name) for name in fields},
        "options": statement["options"],
        "artifacts": canonical_json(statement["artifacts"]),
        "used_s": time.time(),
        "checksum": decision.checksum(),
    }


def signature_columns(signature: Signature | None) -> dict[str, str]:
    """Empty words stand for no signature."""
    return {"key_id": signature.key_id if signature else "", "signature": signature.value if signature else ""}


def row_signature(row: Row[Any]) -> Signature | None:
    """The signature of a row, None if it has none."""
    return Signature(row.key_id, row.signature) if row.signature else None


def decision_of(row: Row[Any]) -> Decision:
    """The decision of a row. Errors: StoreError("damaged entry") if it does not match its checksum."""
    try:
        decision = Decision(
            subgraph=row.subgraph,
            environment=row.environment,
            backend=row.backend,
            shape_class=row.shape_class,
            constants=row.constants,
            options=json.loads(row.options),
            artifacts=tuple(ArtifactRef(*ref) for ref in json.loads(row.artifacts)),
            speedup=row.speedup,
            reason=row.reason,
            decided_s=row.decided_s,
        )
        intact = decision.checksum() == row.checksum
    except (ValueError, TypeError) as error:
        raise _damaged(row) from error
    if not intact:
        raise _damaged(row)
    return decision


def _damaged(row: Row[Any]) -> StoreError:
    return StoreError("damaged entry", f"the decision for {str(row.subgraph)[:16]} does not match its checksum")


def measurement_row(measurement: Measurement) -> dict[str, Any]:
    """The row of a measurement, with an id if it has none. Errors: ValueError for a number that is no number."""
    numbers = (measurement.median_s, measurement.spread_s, measurement.eager_s, measurement.compile_s)
    if any(number is not None and not math.isfinite(number) for number in numbers):
        raise ValueError(f"measurement of {measurement.backend}: {numbers} holds a number that is not finite")
    row = {column.name: getattr(measurement, column.name) for column in tables.measurement.columns}
    return row | {
        "id": measurement.id or uuid.uuid4().hex,
        "options": canonical_json(measurement.options),
        "outcome": measurement.outcome.value,
        "detail": storable(measurement.detail),
        "measured_s": measurement.measured_s or time.time(),
    }


def measurement_of(row: Row[Any]) -> Measurement:
    """The measurement of a row."""
    values = dict(row._mapping)
    return Measurement(**values | {"options": json.loads(row.options), "outcome": Outcome(row.outcome)})


def subgraph_of(row: Row[Any]) -> SubgraphInfo:
    """The subgraph of a row."""
    fields = ("digest", "n_ops", "note", "program", "created_s", "used_s", "text", "run_s", "runs")
    return SubgraphInfo(**{name: getattr(row, name) for name in fields})


def measurements(
    connection: Connection, subgraph: str, environment: str | None, shape_class: str | None
) -> tuple[Measurement, ...]:
    """Measurements of one subgraph, oldest first."""
    m = tables.measurement.c
    query = select(tables.measurement).where(m.subgraph == subgraph).order_by(m.measured_s, m.id)
    if environment is not None:
        query = query.where(m.environment == environment)
    if shape_class is not None:
        query = query.where(m.shape_class == shape_class)
    return tuple(measurement_of(row) for row in connection.execute(query))


def subgraphs(connection: Connection, undecided_in: str | None, limit: int | None) -> tuple[SubgraphInfo, ...]:
    """Subgraphs, last used first; `undecided_in`: only those without a decision in that environment."""
    s = tables.subgraph.c
    query = select(tables.subgraph).order_by(s.used_s.desc(), s.created_s, s.digest).limit(limit)
    if undecided_in is not None:
        d = tables.decision.c
        decided = select(d.subgraph).where(d.subgraph == s.digest, d.environment == undecided_in)
        query = query.where(~decided.exists())
    return tuple(subgraph_of(row) for row in connection.execute(query))


def subgraphs_with_outlines(connection: Connection) -> tuple[tuple[SubgraphInfo, str], ...]:
    """All subgraphs with the hash of their ops."""
    query = select(tables.subgraph).order_by(tables.subgraph.c.created_s, tables.subgraph.c.digest)
    return tuple((subgraph_of(row), row.outline) for row in connection.execute(query))


def subgraph_row_of(connection: Connection, digest: str) -> Row[Any] | None:
    """The row of exactly this subgraph, without its text."""
    s = tables.subgraph.c
    query: Select[Any] = select(s.digest, s.program, s.key_id, s.signature, s.used_s).where(s.digest == digest)
    return connection.execute(query).first()


def subgraphs_by_prefix(connection: Connection, prefix: str) -> Sequence[Row[Any]]:
    """Rows whose digest starts with `prefix` (hex digits only, so that no wildcard can be in it); at most two."""
    query = select(tables.subgraph).where(tables.subgraph.c.digest.startswith(prefix, autoescape=True)).limit(2)
    return connection.execute(query).all()


def decision_rows(connection: Connection, **where: str) -> Sequence[Row[Any]]:
    """Decision rows by column values."""
    d = tables.decision.c
    query = select(tables.decision).where(*(d[name] == value for name, value in where.items()))
    return connection.execute(query.order_by(d.subgraph, d.environment, d.shape_class, d.constants)).all()


def environments(connection: Connection) -> dict[str, str]:
    """Texts of all environments by digest, oldest first."""
    e = tables.environment.c
    return {row.digest: row.text for row in connection.execute(select(e.digest, e.text).order_by(e.created_s))}
