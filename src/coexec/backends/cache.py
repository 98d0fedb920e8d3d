"""Artifacts by key in a private folder: published atomically, checksummed, and never trusted to be there.

One folder per key, `segments/<2 digits>/<key>/`, holds either a compiled segment or the reason why there is none:

    segment.so, segment.json   the library and its list of custom ops (the latter only if it has some)
    program.json               the segment itself with its inputs described, for the tuner (if it was checked on some)
    key.txt                    what the key is the hash of
    meta.json                  {"verified": ..., "report": ...} or {"failure": {"kind": ..., "reason": ...}}
    SHA256SUMS                 digest of every other file

An entry that is missing, incomplete or altered is a miss, and counted. A library is native code: the folder must belong
to the user and be closed to others, or nothing is loaded from it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coexec.config import private_cache_dir
from coexec.errors import CacheFolderError, CoexecError

LIBRARY = "segment.so"
CUSTOM_OPS = "segment.json"
META = "meta.json"
PROGRAM = "program.json"
KEY_TEXT = "key.txt"
SUMS = "SHA256SUMS"

REFUSED = "refused"
"""Entry of meta.json: digest of the tuner's library that was wrong on live inputs, so that this one was compiled."""

NOTE = "note"
"""Entry of meta.json: where the segment was met first, for people."""

REPLACE_TRIES = 20

FAILURE_KINDS = ("not lowerable", "compile error", "crashed", "timeout", "wrong", "slower")
"""Why a key has no artifact."""


class CacheWriteError(CoexecError):
    """An artifact was compiled and could not be stored."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled segment."""

    key: str
    library: Path  # for AOTIModelContainerRunnerCpu; the list of custom ops lies beside it
    meta: Mapping[str, Any] = field(default_factory=dict)  # JSON: verified, report, facts of the compiler, "tuned"

    @property
    def is_checked(self) -> bool:
        """It was right on live inputs, on this machine. The tuner has only inputs that are like them."""
        return bool(self.meta.get("verified", True))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a segment has no artifact. Remembered, so that it is not tried again."""

    key: str
    kind: str  # one of FAILURE_KINDS
    reason: str  # readable, names the op where one is to blame
    facts: Mapping[str, Any] = field(default_factory=dict)  # "op" of what cannot be lowered, "report" of what is wrong


class ArtifactCache:
    """The artifacts of this user. Every method may be called by several processes at once.

    Args:
        root: the folder; by default `segments` in the cache folder, which COEXEC_CACHE_DIR names at each use.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self.counters: Counter[str] = Counter()  # "hit", "miss", "failure hit", "corrupted: ...", "unusable: ..."

    def root(self) -> Path:
        """The folder. CacheFolderError if others can write to it or it cannot be made."""
        if self._root is None:
            return private_cache_dir("segments")
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._root

    def get(self, key: str) -> Artifact | Failure | None:
        """What is known of `key`; None, counted, if nothing is or the entry is damaged."""
        try:
            found = self._load(key)
        except CacheFolderError as error:
            return self._count_miss(f"unusable: {error}")
        except FileNotFoundError:
            return self._count_miss("miss")
        except (OSError, ValueError, KeyError) as error:
            return self._count_miss(f"corrupted: {type(error).__name__}")
        self.counters["hit" if isinstance(found, Artifact) else "failure hit"] += 1
        return found

    def put(self, key: str, text: str, library: Path, meta: Mapping[str, Any], program: Path | None = None) -> Artifact:
        """Store a compiled segment.

        Args:
            key: from :func:`coexec.backends.key.artifact_key`.
            text: what `key` is the hash of.
            library: the .so; a list of custom ops beside it, under the same name with .json, is stored too.
            meta: JSON facts for :attr:`Artifact.meta`.
            program: the segment with its inputs described (see :mod:`coexec.backends.segment_program`).

        Raises:
            CacheWriteError: the folder is unusable or full; nothing half-written is left behind.
        """
        custom_ops = library.with_suffix(".json")
        files = {LIBRARY: library} | ({CUSTOM_OPS: custom_ops} if custom_ops.exists() else {})
        files |= {} if program is None else {PROGRAM: program}
        self._publish(key, text, files, meta)
        return Artifact(key, self._folder(key) / LIBRARY, dict(meta))

    def put_failure(
        self, key: str, text: str, kind: str, reason: str, facts: Mapping[str, Any] | None = None
    ) -> Failure:
        """Remember that `key` has no artifact. A folder that cannot be written is counted and costs only time."""
        assert kind in FAILURE_KINDS, f"{kind!r} is none of {FAILURE_KINDS}"
        failure = Failure(key, kind, reason, dict(facts or {}))
        try:
            self._publish(key, text, {}, {"failure": {"kind": kind, "reason": reason, "facts": failure.facts}})
        except CacheWriteError as error:
            self.counters[f"unusable: {error}"] += 1
        return failure

    def note_runs(self, key: str, run_s: float, runs: int) -> None:
        """In a step an artifact ran `runs` times more, `run_s` seconds each. A folder keeps no such thing."""

    def forget(self, key: str) -> None:
        """Drop what is known of `key`, so that the next one to ask compiles again."""
        with contextlib.suppress(OSError, CacheFolderError):
            self._remove(self._folder(key))

    def _folder(self, key: str) -> Path:
        return self.root() / key[:2] / key

    def _load(self, key: str) -> Artifact | Failure:
        folder = self._folder(key)
        sums = json.loads((folder / SUMS).read_text())
        for name in (META, *(n for n in sums if n != META)):
            if digest_of(folder / name) != sums[name]:
                raise ValueError(f"{name} was altered")
        meta = json.loads((folder / META).read_text())
        if (failure := meta.get("failure")) is not None:
            return Failure(key, failure["kind"], failure["reason"], failure.get("facts", {}))
        if LIBRARY not in sums:
            raise ValueError("an entry without a library")
        return Artifact(key, folder / LIBRARY, meta)

    def _count_miss(self, why: str) -> Artifact | Failure | None:
        self.counters[why] += 1
        return None

    def _publish(self, key: str, text: str, files: Mapping[str, Path], meta: Mapping[str, Any]) -> None:
        """Write the entry under a temporary name and rename it into place."""
        try:
            folder = self._folder(key)
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{key[:8]}-", dir=folder.parent) as scratch:
                _write_entry(Path(scratch) / "entry", text, files, meta)
                self._move_into_place(Path(scratch) / "entry", folder)
        except OSError as error:
            raise CacheWriteError(f"cannot store artifact {key[:12]}: {error}. COEXEC_CACHE_DIR moves it.") from error

    def _move_into_place(self, entry: Path, folder: Path) -> None:
        for _ in range(REPLACE_TRIES):
            self._remove(folder)
            try:
                return os.rename(entry, folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        # Another process stores the same key again and again: its entry is as good as ours.

    def _remove(self, folder: Path) -> None:
        """Rename away, then delete: a reader sees the whole entry or none."""
        doomed = folder.with_name(f".{folder.name[:8]}-{os.getpid()}-{os.urandom(4).hex()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _write_entry(folder: Path, text: str, files: Mapping[str, Path], meta: Mapping[str, Any]) -> None:
    folder.mkdir(mode=0o700)
    for name, source in files.items():
        shutil.copyfile(source, folder / name)
    (folder / KEY_TEXT).write_text(text)
    (folder / META).write_text(json.dumps(dict(meta), indent=1, sort_keys=True))
    names = sorted([*files, KEY_TEXT, META])
    (folder / SUMS).write_text(json.dumps({name: digest_of(folder / name) for name in names}, indent=1))


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content. Errors: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
