"""The store: what the tuner, the backends, the chooser and the command line use.

A serving store (`strict=False`) never raises for trouble of its own: each call returns its "nothing" (None, False, an
empty tuple), the trouble is counted in `counters()` and said once. Tools pass `strict=True` and get StoreError and
TrustError. Wrong arguments raise ValueError in both.

    store = open_store()
    key, environment = key_of_graph(gm), current_environment()
    decision = store.lookup(key, environment)
    if decision is None:
        store.put_subgraph(key, note="model.py:31")      # the tuner finds it there; run eagerly
    else:
        folder = store.checkout(decision)                # verified files under their names, None if they are gone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, update

from coexec.subgraphs import blobs, misses, rows, tables
from coexec.subgraphs.artifacts import ArtifactFolder, Content
from coexec.subgraphs.database import Database
from coexec.subgraphs.entries import (
    ArtifactRef,
    Decision,
    Measurement,
    SubgraphInfo,
    canonical_json,
    is_digest,
    program_statement,
)
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.faults import store_error
from coexec.subgraphs.health import Health, log
from coexec.subgraphs.key import SubgraphKey, digest_of_text
from coexec.subgraphs.location import StoreLocation, current_location
from coexec.subgraphs.prune import PruneReport, prune
from coexec.subgraphs.stats import StoreStats, collect_stats
from coexec.subgraphs.trust import Keyring
from coexec.subgraphs.verify import VerifyReport, verify

T = TypeVar("T")

READ_WAIT_S = 1.0
"""A lookup stands in the user's way: rather a miss than a longer wait for a lock."""


def open_store(*, strict: bool = False) -> Store:
    """The store that `COEXEC_STORE` and `COEXEC_CACHE_DIR` name; both are read again at each use."""
    return Store(strict=strict)


class Store:
    """One store. Safe to use from several threads, and after a fork."""

    def __init__(
        self,
        location: StoreLocation | None = None,
        *,
        strict: bool = False,
        keyring: Keyring | None = None,
        wait_s: float = 5.0,
    ) -> None:
        """`location`: default is what the settings say at each use. `wait_s`: how long a write waits for a lock."""
        self._location = location
        self._strict = strict
        self._wait_s = wait_s
        self._opened: dict[StoreLocation, tuple[Database, ArtifactFolder]] = {}
        self.keyring = keyring or Keyring()
        self.health = Health()

    # Reading ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: SubgraphKey, environment: Environment, constants: str = "") -> Decision | None:
        """The decision for `key` in `environment`, or None; why not is counted, and logged with what differs.

        `constants`: `constants_digest` of the weights at hand. A decision whose artifacts bake in other weights comes
        back without artifacts: its backend and options still hold, the artifacts must be built anew.
        """
        return self._guarded(None, lambda: self._lookup(key, environment, constants))

    def open_artifact(self, artifact: str | ArtifactRef) -> Path | None:
        """Path of an artifact's content, its checksum verified; None if it is missing or damaged.

        Digests are worth as much as where they come from: take them from decisions and programs of this store, whose
        signatures have been checked where others can write to it.
        """
        digest = artifact.digest if isinstance(artifact, ArtifactRef) else artifact
        if not is_digest(digest):
            raise ValueError(f"{digest!r} is no artifact digest: expected 64 hex digits")
        return self._guarded(None, lambda: self._open_artifact(digest))

    def checkout(self, decision: Decision) -> Path | None:
        """A folder with the decision's artifacts under their names, verified; None if one is missing or damaged.

        The files are links to the store's own: read-only. The path stays valid until the artifacts are pruned.
        """
        return self._guarded(None, lambda: self._checkout(decision))

    def program(self, subgraph: str) -> Path | None:
        """The serialized program of a subgraph (its digest), verified; None without one."""
        return self._guarded(None, lambda: self._program(subgraph))

    def explain_miss(self, key: SubgraphKey, environment: Environment) -> str:
        """Lines that say why `lookup` finds nothing: which entries differ from the nearest subgraph or environment."""
        return self._guarded("", lambda: self._read(lambda c: misses.explain(c, key, environment)).text)

    def subgraphs(
        self, *, undecided_in: Environment | None = None, limit: int | None = None
    ) -> tuple[SubgraphInfo, ...]:
        """Stored subgraphs, last used first; `undecided_in`: those that wait for tuning in that environment."""
        undecided = undecided_in.digest if undecided_in else None
        return self._guarded((), lambda: self._read(lambda c: rows.subgraphs(c, undecided, limit)))

    def subgraphs_with_outlines(self) -> tuple[tuple[SubgraphInfo, str], ...]:
        """All subgraphs with the hash of their ops, as an export needs them."""
        return self._guarded((), lambda: self._read(rows.subgraphs_with_outlines))

    def subgraph(self, prefix: str) -> SubgraphInfo | None:
        """The subgraph whose digest starts with `prefix`; None if there is none or more than one."""

        def find(connection: Connection) -> SubgraphInfo | None:
            found = rows.subgraphs_by_prefix(connection, prefix)
            return rows.subgraph_of(found[0]) if len(found) == 1 else None

        return self._guarded(None, lambda: self._read(find))

    def measurements(
        self, subgraph: str, environment: str | None = None, shape_class: str | None = None
    ) -> tuple[Measurement, ...]:
        """Measurements of a subgraph by digest, oldest first. Not signed: information, not authority."""
        return self._guarded((), lambda: self._read(lambda c: rows.measurements(c, subgraph, environment, shape_class)))

    def decisions(self, subgraph: str | None = None) -> tuple[Decision, ...]:
        """Decisions, of one subgraph or all; damaged and untrusted ones are left out and counted."""
        where = {} if subgraph is None else {"subgraph": subgraph}
        none: Sequence[Row[Any]] = ()
        found = self._guarded(none, lambda: self._read(lambda c: rows.decision_rows(c, **where)))
        checked = (self._guarded(None, partial(self._decision, row)) for row in found)
        return tuple(decision for decision in checked if decision is not None)

    def environments(self) -> dict[str, str]:
        """Canonical texts of all environments by digest."""
        return self._guarded({}, lambda: self._read(rows.environments))

    # Writing ---------------------------------------------------------------------------------------------------------

    def put_subgraph(self, key: SubgraphKey, *, program: bytes | Path | None = None, note: str = "") -> bool:
        """Store a subgraph, or mark it as used; returns whether it is stored.

        `program`: the graph itself, serialized (never a pickle), for the tuner; kept if none is stored yet.
        `note`: where it was met, for people.
        """
        if digest_of_text(key.text) != key.digest:
            raise ValueError(
                f"key {key.digest[:16]} does not belong to its text; make keys with key_of_graph/key_of_text"
            )
        return self._guarded(False, lambda: self._put_subgraph(key, program, note))

    def put_artifact(self, content: Content, *, expected: str | None = None) -> str | None:
        """Publish bytes, a file or pieces; returns the digest, to be named in `Decision.artifacts`.

        `expected`: the digest it must have; other content is refused ("artifact altered").
        """
        return self._guarded(None, lambda: self._put_artifact(content, expected))

    def record_measurement(self, measurement: Measurement, environment: Environment) -> bool:
        """Add one measurement made in `environment`; returns whether it is stored."""
        _check_environment(measurement.environment, environment)
        row = rows.measurement_row(measurement)

        def add(connection: Connection) -> bool:
            _put_environment(connection, environment)
            rows.insert_new(connection, tables.measurement, row)
            return True

        return self._guarded(False, lambda: self._write(add))

    def note_runs(self, subgraph: str, run_s: float, runs: int) -> bool:
        """Of a stored subgraph (its digest): `runs` more of them, which take `run_s` seconds each.

        For the order in which the tuner works. Returns whether the subgraph is stored.
        """
        return self._guarded(False, lambda: self._write(lambda c: rows.note_runs(c, subgraph, run_s, runs)))

    def decide(self, decision: Decision, environment: Environment) -> bool:
        """Make `decision` the one for its subgraph, environment, shape class and constants, in one transaction.

        In a shared store it is signed with the user's key, which is made if there is none. Returns whether it is kept.
        """
        _check_environment(decision.environment, environment)
        canonical_json(decision.options)  # ValueError here, not a counted fault
        when = decision.decided_s or time.time()
        decision = replace(decision, decided_s=when, reason=rows.storable(decision.reason))
        return self._guarded(False, lambda: self._decide(decision, environment))

    def forget_decision(self, decision: Decision) -> bool:
        """Delete a decision (its artifact failed when it was installed); returns whether the store took it."""
        condition = rows.primary_key(tables.decision, decision.statement())

        def remove(connection: Connection) -> bool:
            connection.execute(tables.decision.delete().where(condition))
            return True

        return self._guarded(False, lambda: self._write(remove))

    # Looking after it ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What happened in this process: "hit", "miss.<why>", "fault.<reason>", "untrusted"."""
        return self.health.counts()

    def stats(self) -> StoreStats | None:
        """Sizes of everything."""
        return self._guarded(None, lambda: collect_stats(*self._open(), self.counters()))

    def prune(self, *, unused_s: float | None = None, max_bytes: int | None = None) -> PruneReport | None:
        """Delete what was not used for `unused_s` seconds, then the longest unused artifacts above `max_bytes`."""
        return self._guarded(None, lambda: prune(*self._open(), self._signature_columns, unused_s, max_bytes))

    def verify(self, *, repair: bool = False) -> VerifyReport | None:
        """Check every row, checksum, signature and file; `repair` removes what is damaged, sets a broken file aside."""
        return self._guarded(None, lambda: verify(*self._open(), self.keyring, repair))

    @property
    def location(self) -> StoreLocation:
        """Where the store is now. Errors: StoreError("bad url")."""
        return self._location or current_location()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _guarded(self, nothing: T, action: Callable[[], T]) -> T:
        """Run `action`; trouble of the store is counted and `nothing` returned, or raised by a strict store."""
        try:
            if not self._strict:
                self.health.check_pause()
            result = action()
        except StoreError as error:
            self._count_fault(error.reason, error)
            return nothing
        except TrustError as error:
            self._count_fault("untrusted", error)
            return nothing
        except OSError as error:  # of the artifact files; the database's own come as StoreError
            fault = store_error(error, self.location)
            self._count_fault(fault.reason, fault)
            return nothing
        except Exception as error:
            if self._strict:
                raise
            # A cache must not take its user down, whatever nobody thought of; the count and the line keep it visible.
            self._count_fault(f"unexpected {type(error).__name__}", error)
            return nothing
        self.health.well()
        return result

    def _count_fault(self, reason: str, error: Exception) -> None:
        if reason == "paused":
            self.health.count("fault.paused")
        elif self._strict:
            self.health.count(f"fault.{reason}")
        else:
            self.health.fault(reason, str(error))
        if self._strict:
            raise error

    def _open(self) -> tuple[Database, ArtifactFolder]:
        location = self.location
        if location not in self._opened:
            self._opened[location] = (Database(location, self._wait_s), ArtifactFolder(location.folder))
        return self._opened[location]

    def _read(self, action: Callable[[Connection], T]) -> T:
        return self._open()[0].read(action, wait_s=self._wait_s if self._strict else min(self._wait_s, READ_WAIT_S))

    def _write(self, action: Callable[[Connection], T], wait_s: float | None = None) -> T:
        return self._open()[0].write(action, wait_s)

    def _lookup(self, key: SubgraphKey, environment: Environment, constants: str) -> Decision | None:
        where = {"subgraph": key.digest, "environment": environment.digest, "shape_class": key.shape_class}
        found = self._read(lambda connection: rows.decision_rows(connection, **where))
        row = _best_row(found, constants)
        if row is None:
            self._count_miss(key, environment)
            return None
        decision = self._decision(row)
        self.health.count("hit")
        self._mark_used(row)
        return decision if decision.constants in ("", constants) else decision.recipe()

    def _decision(self, row: Row[Any]) -> Decision:
        decision = rows.decision_of(row)
        if self.location.shared:
            self.keyring.check(decision.statement(), rows.row_signature(row))
        return decision

    def _count_miss(self, key: SubgraphKey, environment: Environment) -> None:
        miss = self._read(lambda connection: misses.explain(connection, key, environment))
        self.health.count(f"miss.{miss.kind}")
        log.info("coexec: no decision for subgraph %s: %s", key.digest[:16], miss.text)

    def _mark_used(self, row: Row[Any]) -> None:
        """At most once a day per entry, and without waiting: a lookup is no reason to stand in a queue of writers."""
        now = time.time()
        if now - row.used_s < rows.DAY_S:
            return

        def mark(connection: Connection) -> None:
            for table, where in (
                (tables.decision, rows.primary_key(tables.decision, row._asdict())),
                (tables.subgraph, tables.subgraph.c.digest == row.subgraph),
            ):
                connection.execute(update(table).where(where).values(used_s=now))

        try:
            self._write(mark, wait_s=0.0)
        except StoreError:
            self.health.count("use not noted")

    def _open_artifact(self, digest: str) -> Path:
        database, artifacts = self._open()
        if database.location.shared and not artifacts.holds(digest):
            if not blobs.is_uploaded(database, digest):
                raise blobs.missing(digest)
            artifacts.put(blobs.download(database, digest), expected=digest)
        path = artifacts.open(digest)
        artifacts.touch(digest)
        return path

    def _checkout(self, decision: Decision) -> Path:
        for ref in decision.artifacts:
            self._open_artifact(ref.digest)
        return self._open()[1].checkout(decision.artifacts)

    def _program(self, subgraph: str) -> Path | None:
        row = self._read(lambda connection: rows.subgraph_row_of(connection, subgraph))
        if row is None or not row.program:
            return None
        if self.location.shared:
            self.keyring.check(program_statement(row.digest, row.program), rows.row_signature(row))
        return self._open_artifact(row.program)

    def _put_artifact(self, content: Content, expected: str | None = None) -> str:
        database, artifacts = self._open()
        database.read(lambda connection: None)  # a store that cannot serve gets no files either
        digest = artifacts.put(content, expected)
        if database.location.shared:
            blobs.upload(database, digest, artifacts.open(digest))
        return digest

    def _put_subgraph(self, key: SubgraphKey, program: bytes | Path | None, note: str) -> bool:
        known = self._read(lambda connection: rows.subgraph_row_of(connection, key.digest))
        if known is not None and time.time() - known.used_s < rows.DAY_S and (program is None or known.program):
            return True  # the usual case of a warm start: many processes, and none needs the write lock
        digest = "" if program is None else self._put_artifact(program)
        signed = (
            self._signature_columns(program_statement(key.digest, digest)) if digest else rows.signature_columns(None)
        )
        row = rows.subgraph_row(key, note) | {"program": digest} | signed
        return self._write(lambda connection: rows.put_subgraph(connection, row))

    def _decide(self, decision: Decision, environment: Environment) -> bool:
        for ref in decision.artifacts:
            self._require(ref.digest)
        row = rows.decision_row(decision) | self._signature_columns(decision.statement())

        def put(connection: Connection) -> bool:
            _put_environment(connection, environment)
            rows.upsert(connection, tables.decision, row)
            return True

        return self._write(put)

    def _require(self, digest: str) -> None:
        """Errors: StoreError("artifact missing"): a decision must not name what was never published."""
        database, artifacts = self._open()
        shared = database.location.shared
        if not (blobs.is_uploaded(database, digest) if shared else artifacts.path(digest).exists()):
            raise StoreError(
                "artifact missing", f"artifact {digest[:16]} is not in the store; put_artifact comes first"
            )

    def _signature_columns(self, statement: Mapping[str, object]) -> dict[str, str]:
        if not self.location.shared:
            return rows.signature_columns(None)
        self.keyring.create()
        return rows.signature_columns(self.keyring.sign(statement))


def _best_row(found: Sequence[Row[Any]], constants: str) -> Row[Any] | None:
    """The decision for these very weights, else one for any weights, else another model's (for its recipe)."""
    order = {constants: 0, "": 1}
    return min(found, key=lambda row: (order.get(row.constants, 2), -row.decided_s), default=None)


def _put_environment(connection: Connection, environment: Environment) -> None:
    values = {"digest": environment.digest, "text": environment.text, "created_s": time.time()}
    rows.insert_new(connection, tables.environment, values)


def _check_environment(digest: str, environment: Environment) -> None:
    if digest != environment.digest:
        raise ValueError(f"entry of environment {digest[:16]} given with environment {environment.digest[:16]}")
