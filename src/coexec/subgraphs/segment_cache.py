"""Co-execution's compiled segments in the store, behind the cache that the compile worker knows.

The worker's folder stays what it was: a fast copy on this machine, written by the compile process. Behind it stands the
store. What the folder lacks is looked up there, and what was compiled is published there, so that a second process, a
team or a fleet starts with compiled segments, and export, prune and signatures cover them.
"""

from __future__ import annotations

import threading
from pathlib import Path

from coexec.backends import key as segment_key
from coexec.backends.cache import CUSTOM_OPS, KEY_TEXT, LIBRARY, Artifact, ArtifactCache, CacheWriteError, Failure
from coexec.errors import CacheFolderError
from coexec.subgraphs.entries import ArtifactRef, Decision
from coexec.subgraphs.environment import Environment, environment_of_entries
from coexec.subgraphs.key import SubgraphKey, key_of_text
from coexec.subgraphs.store import Store

BACKEND = "coexec-segment"
"""The backend of these decisions: a library with co-execution's calling convention, for its own runtime only."""


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
        """What the folder has, else what the store has; what only the folder has is published in the background."""
        found = super().get(key)
        if found is None:
            return self._from_store(key)
        if isinstance(found, Artifact) and key not in self._published:
            self._published.add(key)
            # Hashing and syncing take tens of milliseconds, and the caller is a training loop.
            threading.Thread(target=self.publish, args=(found,), name="coexec-publish", daemon=True).start()
        return found

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
        note = f"segment of {key.n_ops} ops"
        if None in refs or not self._store.put_subgraph(key, note=note):
            return False
        decision = Decision(
            subgraph=key.digest,
            environment=environment.digest,
            backend=BACKEND,
            options={"meta": dict(artifact.meta)},
            artifacts=tuple(ref for ref in refs if ref is not None),
            reason=note,
        )
        return self._store.decide(decision, environment)

    def _reference(self, file: Path) -> ArtifactRef | None:
        digest = self._store.put_artifact(file)
        return None if digest is None else ArtifactRef(file.name, digest, file.stat().st_size)

    def _from_store(self, key: str) -> Artifact | None:
        """Copy an entry of the store into the folder, under the text that it is kept by."""
        known = self._store.subgraph(key)
        if known is None:
            return None
        decision = self._store.lookup(key_of_segment(known.text), environment_of_segments())
        if decision is None or decision.backend != BACKEND or (folder := self._store.checkout(decision)) is None:
            return None
        self._published.add(key)
        meta = decision.options.get("meta", {})
        try:
            artifact = self.put(key, known.text, folder / LIBRARY, meta)
        except (CacheWriteError, CacheFolderError) as error:
            self.counters[f"unusable: {error}"] += 1
            return Artifact(key, folder / LIBRARY, meta)
        self.counters["from the store"] += 1
        return artifact


def key_of_segment(text: str) -> SubgraphKey:
    """The store's key of a segment: its digest is the worker's own key, the hash of the same text."""
    calls = (line.partition("(")[0] for line in text.splitlines())
    return key_of_text(text, [name for name in calls if "::" in name])


def environment_of_segments() -> Environment:
    """What segments depend on besides their text (which names the same entries, so that a miss can be explained)."""
    return environment_of_entries(segment_key.environment())
