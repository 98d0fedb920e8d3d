"""Co-execution's compiled segments in the store, behind the cache that the compile worker knows.

The worker's folder stays what it was: a fast copy on this machine, written by the compile process. Behind it stands the
store. What the folder lacks is looked up there, and what was compiled is published there, so that a second process, a
team or a fleet starts with compiled segments, and export, prune and signatures cover them.

With a segment goes its program, from which the tuner makes other libraries (:mod:`coexec.backends.variants`). Its
decision takes the place of the first one under the same key, and names the library that the folder then gets. The first
look at a segment therefore asks the store, even if the folder has one.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

from coexec.backends import key as segment_key
from coexec.backends.cache import (
    CUSTOM_OPS,
    KEY_TEXT,
    LIBRARY,
    NOTE,
    PROGRAM,
    REFUSED,
    SUMS,
    Artifact,
    ArtifactCache,
    CacheWriteError,
    Failure,
)
from coexec.backends.variants import REPLAY, USUAL
from coexec.errors import CacheFolderError
from coexec.subgraphs.entries import ArtifactRef, Decision
from coexec.subgraphs.environment import Environment, environment_of_entries
from coexec.subgraphs.key import SubgraphKey, key_of_text
from coexec.subgraphs.store import Store

BACKEND = USUAL
"""The backend of decisions that no tuner made: a library with co-execution's calling convention, for its own runtime
only. Those of the tuner begin with the same word."""


class SegmentCache(ArtifactCache):
    """The worker's cache with a store behind it.

    Args:
        store: of the process; a serving one, so that its trouble costs only speed.
        root: as for :class:`ArtifactCache`.
    """

    def __init__(self, store: Store, root: Path | None = None) -> None:
        super().__init__(root)
        self._store = store
        self._published: set[str] = set()

    def get(self, key: str) -> Artifact | Failure | None:
        """What the tuner has chosen, else what the folder has, else what the store has.

        What only the folder has is published in the background.
        """
        found = super().get(key)
        text = self._text(key, found)
        decision = None if text is None else self._decision(text)
        if text is None or decision is None:
            self._publish_later(key, found)
            return found
        if found is not None and _names(decision, _refused(found)):
            return self._without(decision, key, found)
        self._published.add(key)
        if decision.backend == REPLAY:
            return Failure(key, "slower", decision.reason)
        if isinstance(found, Artifact) and self._serves(found, decision):
            return replace(found, meta={**found.meta, **_tuning(decision)})
        return self._from_store(key, text, decision) or found

    def publish(self, artifact: Artifact) -> bool:
        """Put a compiled segment into the store unless it is there; returns whether it is there now."""
        try:
            text = (artifact.library.parent / KEY_TEXT).read_text()
        except OSError as error:
            self.counters[f"not published: {type(error).__name__}"] += 1
            return False
        key, environment = key_of_segment(text), environment_of_segments()
        if self._store.lookup(key, environment) is not None:
            return True
        files = [file for file in (artifact.library, artifact.library.parent / CUSTOM_OPS) if file.exists()]
        refs = [self._reference(file) for file in files]
        place, what = str(artifact.meta.get(NOTE, "")), f"segment of {key.n_ops} ops"
        note = f"{place}: {what}" if place else what
        program = artifact.library.parent / PROGRAM
        if None in refs or not self._store.put_subgraph(key, program=program if program.exists() else None, note=note):
            return False
        decision = Decision(
            subgraph=key.digest,
            environment=environment.digest,
            backend=artifact.meta.get("backend", BACKEND),
            options={"metadata": dict(artifact.meta)},
            artifacts=tuple(ref for ref in refs if ref is not None),
            reason=note,
        )
        return self._store.decide(decision, environment)

    def note_runs(self, key: str, run_s: float, runs: int) -> None:
        """Tell the store, in the background."""
        arguments = (key, run_s, runs)
        threading.Thread(target=self._store.note_runs, args=arguments, name="coexec-note-runs", daemon=True).start()

    def _reference(self, file: Path) -> ArtifactRef | None:
        digest = self._store.put_artifact(file)
        return None if digest is None else ArtifactRef(file.name, digest, file.stat().st_size)

    def _publish_later(self, key: str, found: Artifact | Failure | None) -> None:
        """Hashing and syncing take tens of milliseconds, and the caller is a training loop."""
        if isinstance(found, Artifact) and key not in self._published:
            self._published.add(key)
            threading.Thread(target=self.publish, args=(found,), name="coexec-publish", daemon=True).start()

    def _text(self, key: str, found: Artifact | Failure | None) -> str | None:
        """What the key is the hash of; None if neither folder nor store knows."""
        if isinstance(found, Artifact):
            try:
                return (found.library.parent / KEY_TEXT).read_text()
            except OSError as error:
                self.counters[f"not looked up: {type(error).__name__}"] += 1
                return None
        known = self._store.subgraph(key)
        return None if known is None else known.text

    def _decision(self, text: str) -> Decision | None:
        """The store's decision for a segment here, if its backend is one of ours."""
        key, environment = key_of_segment(text), environment_of_segments()
        if not any(decision.environment == environment.digest for decision in self._store.decisions(key.digest)):
            return None  # `lookup` would look for a reason, which takes a while
        decision = self._store.lookup(key, environment)
        return decision if decision is not None and decision.backend.startswith(BACKEND) else None

    def _without(self, decision: Decision, key: str, found: Artifact | Failure) -> Artifact | Failure | None:
        """The tuner's library was wrong on live inputs, or took the compile process with it: as if never tuned."""
        self.counters["wrong on live inputs"] += 1
        self._store.forget_decision(decision)
        if isinstance(found, Failure):
            self.forget(key)  # it is the library's failure, not the segment's
            return None
        self._publish_later(key, found)
        return found

    def _serves(self, found: Artifact, decision: Decision) -> bool:
        """Whether the folder's library will do: the very one, or another machine's or process's usual one."""
        if decision.backend == BACKEND == found.meta.get("backend", BACKEND):
            return True
        try:
            sums = json.loads((found.library.parent / SUMS).read_text())
        except OSError as error:  # another process replaces the entry at this moment
            self.counters[f"not compared: {type(error).__name__}"] += 1
            return True
        return _names(decision, sums[LIBRARY])

    def _from_store(self, key: str, text: str, decision: Decision) -> Artifact | None:
        """Copy what the decision names into the folder; None, counted by the store, if it is missing or no good."""
        if not decision.artifacts or (folder := self._store.checkout(decision)) is None:
            return None
        meta = {**decision.options.get("metadata", {}), **_tuning(decision)}
        try:
            program = self._folder(key) / PROGRAM
            artifact = self.put(key, text, folder / LIBRARY, meta, program if program.exists() else None)
        except (CacheWriteError, CacheFolderError) as error:
            self.counters[f"unusable: {error}"] += 1
            return Artifact(key, folder / LIBRARY, meta)
        self.counters["from the store"] += 1
        return artifact


def _names(decision: Decision, library: str | None) -> bool:
    """Whether the decision's library has this digest."""
    return any(ref.name == LIBRARY and ref.digest == library for ref in decision.artifacts)


def _refused(found: Artifact | Failure) -> str | None:
    """Digest of the tuner's library that was no good here."""
    return (found.meta if isinstance(found, Artifact) else found.facts).get(REFUSED)


def _tuning(decision: Decision) -> dict[str, str]:
    """The tuner's choice, and what `step.explain()` says of it; nothing where it has made none."""
    return {"backend": decision.backend, "tuned": decision.reason} if decision.options.get("tried") else {}


def key_of_segment(text: str) -> SubgraphKey:
    """The store's key of a segment: its digest is the worker's own key, the hash of the same text."""
    calls = (line.partition("(")[0] for line in text.splitlines())
    return key_of_text(text, [name for name in calls if "::" in name])


def environment_of_segments() -> Environment:
    """What segments depend on besides their text (which names the same entries, so that a miss can be explained)."""
    return environment_of_entries(segment_key.environment())
