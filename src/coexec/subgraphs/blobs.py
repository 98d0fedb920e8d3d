"""Artifacts inside a shared database, in chunks: whoever reaches the URL reaches the files, no second server needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, delete, insert, select

from coexec.subgraphs import tables
from coexec.subgraphs.artifacts import CHUNK_BYTES, ArtifactFolder
from coexec.subgraphs.database import Database
from coexec.subgraphs.errors import StoreError


def upload(database: Database, digest: str, file: Path) -> None:
    """Put the content of `file` under `digest` in one transaction, unless it is there. Errors: StoreError."""
    if is_uploaded(database, digest):
        return
    try:
        database.write(lambda connection: _insert(connection, digest, file))
    except StoreError as error:
        if error.reason != "conflict" or not is_uploaded(database, digest):
            raise  # a conflict is another writer of the same bytes, who was first


def download(database: Database, digest: str) -> Iterator[bytes]:
    """The chunks of `digest` in order, none if it is not there. The caller hashes them: here nothing is believed."""
    position = 0
    while (chunk := database.read(partial(_chunk, digest=digest, position=position))) is not None:
        yield chunk
        position += 1


def is_uploaded(database: Database, digest: str) -> bool:
    """Whether the database says that it holds `digest`."""
    return database.read(lambda connection: _is_present(connection, digest))


def remove(connection: Connection, digest: str) -> None:
    """Delete the content, in the caller's transaction."""
    connection.execute(delete(tables.artifact).where(tables.artifact.c.digest == digest))
    connection.execute(delete(tables.artifact_chunk).where(tables.artifact_chunk.c.digest == digest))


def _is_present(connection: Connection, digest: str) -> bool:
    return connection.scalar(select(tables.artifact.c.digest).where(tables.artifact.c.digest == digest)) is not None


def _insert(connection: Connection, digest: str, file: Path) -> None:
    if _is_present(connection, digest):
        return
    now = time.time()
    # The row first: of two writers at once the second waits here, and then fails on the key instead of on a chunk.
    row = {"digest": digest, "size_bytes": file.stat().st_size, "created_s": now, "used_s": now}
    connection.execute(insert(tables.artifact).values(**row))
    with file.open("rb") as content:
        position = 0
        while chunk := content.read(CHUNK_BYTES):
            values = {"digest": digest, "position": position, "content": chunk}
            connection.execute(insert(tables.artifact_chunk).values(**values))
            position += 1


def _chunk(connection: Connection, digest: str, position: int) -> bytes | None:
    c = tables.artifact_chunk.c
    query = select(c.content).where(c.digest == digest, c.position == position)
    content = connection.scalar(query)
    return None if content is None else bytes(content)


def missing(digest: str) -> StoreError:
    """The error for content that the shared store does not hold."""
    return StoreError("artifact missing", f"artifact {digest[:16]} is not in the shared store; it was pruned")


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One artifact's size and last use (time of day)."""

    size_bytes: int
    used_s: float


def stored_artifacts(database: Database, artifacts: ArtifactFolder) -> dict[str, StoredArtifact]:
    """Every artifact by digest: the files here, and in a shared store what the database holds."""
    known = {digest: StoredArtifact(size, used_s) for digest, size, used_s in artifacts.digests()}
    if database.location.shared:
        a = tables.artifact.c
        query = select(a.digest, a.size_bytes, a.used_s)
        for digest, size, used_s in database.read(lambda connection: connection.execute(query).all()):
            known[digest] = StoredArtifact(size, used_s)
    return known


def uploaded_digests(database: Database) -> list[str]:
    """Digests of all content in the shared database."""
    return database.read(lambda connection: list(connection.scalars(select(tables.artifact.c.digest))))
