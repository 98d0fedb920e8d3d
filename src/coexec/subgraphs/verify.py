"""Checking everything a store holds: the file, every row, every signature, every artifact."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, delete, select, text
from sqlalchemy.sql import Executable

from coexec.subgraphs import blobs, rows, tables
from coexec.subgraphs.artifacts import ArtifactFolder, hash_file
from coexec.subgraphs.database import Database
from coexec.subgraphs.entries import program_statement
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.key import digest_of_text
from coexec.subgraphs.prune import without_program
from coexec.subgraphs.trust import Keyring


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a store."""

    kind: str  # "database", "subgraph", "decision", "artifact"
    identity: str  # digest or file
    message: str
    repaired: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found; `ok` if nothing."""

    checked: int  # rows and files
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Finding:
    """One checked thing."""

    kind: str
    identity: str
    complaint: str  # "" if it is fine
    mend: Callable[[], object]  # removes it


def verify(database: Database, artifacts: ArtifactFolder, keyring: Keyring, repair: bool) -> VerifyReport:
    """Check the file, then rows, then artifacts; `repair` removes what is wrong: all of it can be made anew.

    Errors: StoreError if the store cannot be read for another reason than its own damage.
    """
    broken = _damage(database)
    if broken:
        return VerifyReport(1, (_set_aside(database, broken) if repair else _problem(database, broken, False),))
    checked, problems = 0, []
    for finding in _findings(database, artifacts, keyring):
        checked += 1
        if finding.complaint:
            if repair:
                finding.mend()
            problems.append(Problem(finding.kind, finding.identity, finding.complaint, repair))
    return VerifyReport(checked, tuple(problems))


def _findings(database: Database, artifacts: ArtifactFolder, keyring: Keyring) -> Iterator[_Finding]:
    yield from _files(artifacts)
    if database.location.shared:
        yield from _uploads(database)
    yield from _subgraphs(database, keyring)
    yield from _decisions(database, artifacts, keyring)


# The database file ---------------------------------------------------------------------------------------------------


def _damage(database: Database) -> str:
    try:
        return database.read(_integrity)
    except StoreError as error:
        if error.reason != "corrupted":
            raise
        return str(error)


def _integrity(connection: Connection) -> str:
    if connection.dialect.name != "sqlite":
        return ""
    found = [str(line) for line in connection.execute(text("PRAGMA integrity_check(5)")).scalars()]
    return "" if found == ["ok"] else "; ".join(found)


def _set_aside(database: Database, broken: str) -> Problem:
    """Rename the damaged file and its companions: somebody may still want to rescue rows from it."""
    file = database.location.sqlite_file
    if file is None:
        return _problem(database, broken, False)
    suffix = f".damaged-{time.time_ns()}"
    for companion in (f"{file}-wal", f"{file}-shm"):
        with suppress(FileNotFoundError):
            Path(companion).rename(f"{companion}{suffix}")
    aside = file.rename(f"{file}{suffix}")
    return _problem(database, f"{broken}; moved to {aside}, a new one will be made", True)


def _problem(database: Database, message: str, repaired: bool) -> Problem:
    return Problem("database", str(database.location.sqlite_file), message, repaired)


# Artifacts -----------------------------------------------------------------------------------------------------------


def _files(artifacts: ArtifactFolder) -> Iterator[_Finding]:
    for digest, _, _ in list(artifacts.digests()):
        intact = hash_file(artifacts.path(digest)) == digest
        complaint = "" if intact else "the file does not match its checksum"
        yield _Finding("artifact", digest, complaint, partial(artifacts.remove, digest))


def _uploads(database: Database) -> Iterator[_Finding]:
    for digest in blobs.uploaded_digests(database):
        content = hashlib.sha256()
        for chunk in blobs.download(database, digest):
            content.update(chunk)
        complaint = "" if content.hexdigest() == digest else "the content does not match its checksum"
        yield _Finding("artifact", digest, complaint, partial(_remove_upload, database, digest))


def _remove_upload(database: Database, digest: str) -> None:
    database.write(lambda connection: blobs.remove(connection, digest))


# Rows ----------------------------------------------------------------------------------------------------------------


def _subgraphs(database: Database, keyring: Keyring) -> Iterator[_Finding]:
    s = tables.subgraph
    for row in database.read(lambda connection: connection.execute(select(s)).all()):
        remove: Executable = delete(s).where(s.c.digest == row.digest)
        complaint = "" if digest_of_text(row.text) == row.digest else "the text does not match its hash"
        if not complaint and row.program and database.location.shared:
            complaint = _trust_complaint(keyring, program_statement(row.digest, row.program), row)
            remove = without_program(row.program)
        yield _Finding("subgraph", row.digest, complaint, partial(_execute, database, remove))


def _decisions(database: Database, artifacts: ArtifactFolder, keyring: Keyring) -> Iterator[_Finding]:
    present = set(blobs.stored_artifacts(database, artifacts))
    for row in database.read(rows.decision_rows):
        remove = delete(tables.decision).where(rows.primary_key(tables.decision, row._asdict()))
        complaint = _decision_complaint(row, database, keyring, present)
        yield _Finding("decision", row.subgraph, complaint, partial(_execute, database, remove))


def _decision_complaint(row: Row[Any], database: Database, keyring: Keyring, present: set[str]) -> str:
    try:
        decision = rows.decision_of(row)
    except StoreError as error:
        return str(error)
    missing = [ref.name for ref in decision.artifacts if ref.digest not in present]
    if missing:
        return f"artifacts are missing: {', '.join(missing)}"
    return _trust_complaint(keyring, decision.statement(), row) if database.location.shared else ""


def _trust_complaint(keyring: Keyring, statement: dict[str, object], row: Row[Any]) -> str:
    try:
        keyring.check(statement, rows.row_signature(row))
    except TrustError as error:
        return str(error)
    return ""


def _execute(database: Database, statement: Executable) -> None:
    database.write(lambda connection: connection.execute(statement))
