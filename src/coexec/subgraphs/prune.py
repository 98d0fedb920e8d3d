"""Making a store smaller: what was not used for long goes first, and no row ever names a file that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import Connection, Update, delete, select, update

from coexec.subgraphs import blobs, rows, tables
from coexec.subgraphs.artifacts import STALE_S, ArtifactFolder
from coexec.subgraphs.blobs import StoredArtifact, stored_artifacts
from coexec.subgraphs.database import Database
from coexec.subgraphs.errors import StoreError

Sign = Callable[[Mapping[str, object]], dict[str, str]]
"""Signature columns for a statement (empty ones in a private store)."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune` deleted."""

    subgraphs: int
    decisions: int
    measurements: int
    artifacts: int
    artifact_bytes: int
    leftovers: int  # files of killed writers, folders of artifacts that are gone


def prune(
    database: Database, artifacts: ArtifactFolder, sign: Sign, unused_s: float | None, max_bytes: int | None
) -> PruneReport:
    """Delete rows unused for `unused_s` seconds, artifacts that no row names, and the longest unused above `max_bytes`.

    A decision whose artifacts go keeps its backend and options, the recipe. Files younger than an hour that no row
    names stay: their writer is about to. Errors: StoreError.
    """
    subgraphs, decisions, measurements = database.write(lambda connection: _prune_rows(connection, unused_s))
    known = stored_artifacts(database, artifacts)
    doomed = _doomed(known, database.read(_named_artifacts), max_bytes)
    if doomed:
        database.write(lambda connection: _detach(connection, doomed, sign))
    for digest in doomed:
        artifacts.remove(digest)
    size = sum(known[digest].size_bytes for digest in doomed)
    return PruneReport(subgraphs, decisions, measurements, len(doomed), size, artifacts.sweep())


def _prune_rows(connection: Connection, unused_s: float | None) -> tuple[int, int, int]:
    """Returns how many subgraphs, decisions and measurements were deleted."""
    if unused_s is None:
        return 0, 0, 0
    s, d, m, e = tables.subgraph.c, tables.decision.c, tables.measurement.c, tables.environment.c
    limit, known = time.time() - unused_s, select(s.digest)
    decisions = connection.execute(delete(tables.decision).where(d.used_s < limit)).rowcount
    subgraphs = connection.execute(delete(tables.subgraph).where(s.used_s < limit)).rowcount
    # A decision or a measurement may be of a subgraph that was never stored here (an import): its own age counts.
    old = m.subgraph.not_in(known) & (m.measured_s < limit)
    measurements = connection.execute(delete(tables.measurement).where(old)).rowcount
    in_use = select(d.environment).union(select(m.environment))
    connection.execute(delete(tables.environment).where(e.digest.not_in(in_use)))
    return subgraphs, decisions, measurements


def _named_artifacts(connection: Connection) -> set[str]:
    s = tables.subgraph.c
    named = set(connection.scalars(select(s.program).where(s.program != "")))
    for row in rows.decision_rows(connection):
        with suppress(StoreError):  # a damaged row names nothing; `verify` reports it
            named |= {ref.digest for ref in rows.decision_of(row).artifacts}
    return named


def _doomed(known: dict[str, StoredArtifact], named: set[str], max_bytes: int | None) -> set[str]:
    young = time.time() - STALE_S
    doomed = {digest for digest, artifact in known.items() if digest not in named and artifact.used_s < young}
    if max_bytes is None:
        return doomed
    kept = sorted((known[digest].used_s, digest) for digest in known.keys() - doomed)
    total = sum(known[digest].size_bytes for _, digest in kept)
    for _, digest in kept:
        if total <= max_bytes:
            break
        doomed.add(digest)
        total -= known[digest].size_bytes
    return doomed


def _detach(connection: Connection, doomed: set[str], sign: Sign) -> None:
    """Rows forget the doomed artifacts before the files go."""
    for digest in doomed:
        blobs.remove(connection, digest)
        connection.execute(without_program(digest))
    for row in rows.decision_rows(connection):
        with suppress(StoreError):
            decision = rows.decision_of(row)
            if any(ref.digest in doomed for ref in decision.artifacts):
                recipe = replace(decision, artifacts=())
                signed = sign(recipe.statement())  # only what we can vouch for: an untrusted row stays untrusted
                values = rows.decision_row(recipe) | {"used_s": row.used_s} | signed
                rows.upsert(connection, tables.decision, values)


def without_program(digest: str) -> Update:
    """The statement after which no subgraph names program `digest`."""
    s = tables.subgraph
    return update(s).where(s.c.program == digest).values(program="", key_id="", signature="")
