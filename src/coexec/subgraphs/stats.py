"""How much is in a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection, func, select
from sqlalchemy.engine import make_url

from coexec.subgraphs import tables
from coexec.subgraphs.artifacts import ArtifactFolder
from coexec.subgraphs.blobs import stored_artifacts
from coexec.subgraphs.database import Database
from coexec.subgraphs.migrations import newest_version


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes and counts of one store."""

    url: str  # without the password
    schema: int
    subgraphs: int
    decided: int  # subgraphs with a decision in some environment
    environments: int
    measurements: int
    decisions: int
    backends: dict[str, int]  # decisions by backend
    artifacts: int
    artifact_bytes: int
    database_bytes: int | None  # None for a server
    counters: dict[str, int] = field(default_factory=dict)  # of this process


def collect_stats(database: Database, artifacts: ArtifactFolder, counters: dict[str, int]) -> StoreStats:
    """Count everything. Errors: StoreError."""
    counts, backends = database.read(_counts)
    sizes = [known.size_bytes for known in stored_artifacts(database, artifacts).values()]
    file = database.location.sqlite_file
    return StoreStats(
        url=make_url(database.location.url).render_as_string(hide_password=True),
        schema=newest_version(),
        backends=backends,
        artifacts=len(sizes),
        artifact_bytes=sum(sizes),
        database_bytes=None if file is None else file.stat().st_size,
        counters=counters,
        **counts,
    )


def _counts(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
    d = tables.decision.c
    queries = {
        "subgraphs": select(func.count()).select_from(tables.subgraph),
        "decided": select(func.count(d.subgraph.distinct())),
        "environments": select(func.count()).select_from(tables.environment),
        "measurements": select(func.count()).select_from(tables.measurement),
        "decisions": select(func.count()).select_from(tables.decision),
    }
    counts = {name: connection.scalar(query) or 0 for name, query in queries.items()}
    by_backend = connection.execute(
        select(d.backend, func.count().label("number")).group_by(d.backend).order_by(d.backend)
    )
    return counts, {row.backend: row.number for row in by_backend}
