"""Files by the hash of their content, in the private folder of one user.

Published whole or not at all: written under a name that no reader looks for, synced, then renamed. Two writers of the
same content write the same bytes, so it does not matter who wins. Read only after the content was hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from coexec.subgraphs.entries import ArtifactRef, canonical_json, is_digest
from coexec.subgraphs.errors import StoreError

CHUNK_BYTES = 4 << 20
Content = bytes | Path | Iterable[bytes]
"""What can be published: bytes, a file, or pieces (never all of them in memory at once)."""

STALE_S = 3600.0  # a file in `incoming` that is older belongs to a writer that was killed


class ArtifactFolder:
    """Content-addressed files below `folder`; safe for several threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "artifacts"
        self._incoming = folder / "incoming"
        self._checkouts = folder / "checkouts"
        self._verified: dict[str, tuple[int, int, int]] = {}  # digest -> identity of the file that was hashed

    def path(self, digest: str) -> Path:
        """Where the content with `digest` lies if it is here. Errors: ValueError for what is no digest."""
        if not is_digest(digest):
            raise ValueError(f"{digest!r} is no artifact digest: expected 64 hex digits")
        return self._files / digest[:2] / digest

    def put(self, content: Content, expected: str | None = None) -> str:
        """Publish `content` and return its digest.

        Errors: StoreError("artifact altered") if it does not hash to `expected`; nothing is published then. OSError.
        """
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._incoming / f"{uuid.uuid4().hex}.part"
        try:
            digest = _write(temporary, _chunks(content))
            if expected is not None and digest != expected:
                message = f"content hashes to {digest[:16]}, {expected[:16]} was promised; it is refused"
                raise StoreError("artifact altered", message)
            self._publish(temporary, digest)
        finally:
            temporary.unlink(missing_ok=True)
        return digest

    def _publish(self, temporary: Path, digest: str) -> None:
        final = self.path(digest)
        self._files.mkdir(mode=0o700, exist_ok=True)  # on its own: parents made on the way would not get the mode
        final.parent.mkdir(mode=0o700, exist_ok=True)
        if self.holds(digest):
            os.utime(final)  # looks new to `prune`, which spares what a running writer is about to refer to
        else:
            os.replace(temporary, final)  # also heals a damaged file; who has it mapped keeps the old one

    def holds(self, digest: str) -> bool:
        """Whether the content is here and undamaged."""
        try:
            self.open(digest)
        except StoreError:
            return False
        return True

    def open(self, digest: str) -> Path:
        """Path of the content, hashed first (once per process and file).

        Errors: StoreError("artifact missing"), or ("artifact damaged"): then the file is removed, to be made anew.
        """
        path = self.path(digest)
        try:
            identity = _identity(path)
            if self._verified.get(digest) != identity:
                if hash_file(path) != digest:
                    path.unlink(missing_ok=True)
                    raise StoreError("artifact damaged", f"{path} does not match its checksum; it was removed")
                self._verified[digest] = identity
        except FileNotFoundError as error:
            message = f"artifact {digest[:16]} is not here; it was pruned or deleted"
            raise StoreError("artifact missing", message) from error
        return path

    def checkout(self, refs: tuple[ArtifactRef, ...]) -> Path:
        """A folder that holds `refs` under their names, for backends that look for `model.bin` beside `model.xml`.

        The files are read-only links to the contents: do not write to them. Errors as :meth:`open`; ValueError if two
        files have one name.
        """
        names = [ref.name for ref in refs]
        if len(set(names)) != len(names):
            raise ValueError(f"two files of one decision have the same name: {sorted(names)}")
        identity = canonical_json(sorted([ref.name, ref.digest] for ref in refs))
        folder = self._checkouts / hashlib.sha256(identity.encode()).hexdigest()
        sources = {ref.name: self.open(ref.digest) for ref in refs}
        if not _is_checkout_of(folder, sources):
            self._make_checkout(folder, sources)
        return folder

    def _make_checkout(self, folder: Path, sources: dict[str, Path]) -> None:
        self._checkouts.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._checkouts / f"{uuid.uuid4().hex}.part"
        temporary.mkdir(mode=0o700)
        for name, source in sources.items():
            _link(source, temporary / name)
        aside = self._checkouts / f"{uuid.uuid4().hex}.part"
        try:
            if not _is_checkout_of(folder, sources):  # else another process was first
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(aside)  # an incomplete one
                temporary.rename(folder)
        except OSError:
            if not _is_checkout_of(folder, sources):
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)

    def digests(self) -> Iterator[tuple[str, int, float]]:
        """(digest, size in bytes, time of day it was last published or opened for use) of every file."""
        for path in self._files.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if is_digest(path.name):
                    yield path.name, status.st_size, status.st_mtime

    def touch(self, digest: str) -> None:
        """Mark as used now, for `prune`. A read-only folder keeps its old times."""
        with contextlib.suppress(OSError):
            path = self.path(digest)
            os.utime(path)
            self._verified[digest] = _identity(path)

    def remove(self, digest: str) -> None:
        """Delete the content. Who has it open or mapped keeps it."""
        self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Delete leftovers of killed writers and checkouts whose content is gone; returns how many."""
        removed = 0
        for path in [*self._incoming.glob("*"), *self._checkouts.glob("*")]:
            if self._is_leftover(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _is_leftover(self, path: Path) -> bool:
        try:
            if path.suffix == ".part":
                return time.time() - path.stat().st_mtime > STALE_S
            # A link count of one: the content this file was linked to has been removed.
            return any(file.stat().st_nlink == 1 for file in path.iterdir())
        except FileNotFoundError:
            return False


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chunks(content: Content) -> Iterable[bytes]:
    if isinstance(content, bytes):
        return (content,)
    return _chunks_of(content) if isinstance(content, Path) else content


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _write(path: Path, chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    # Read-only for its own user too: a backend that writes into what it was given gets an error, not everyone's file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # without it a power cut can leave a renamed file without content
    return digest.hexdigest()


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        target.chmod(0o400)


def _is_checkout_of(folder: Path, sources: dict[str, Path]) -> bool:
    """Whether `folder` holds exactly these files: the very same inodes, or (without hard links) the same bytes."""
    try:
        names = {path.name for path in folder.iterdir()}
        return names == sources.keys() and all(_is_same(folder / name, source) for name, source in sources.items())
    except FileNotFoundError:
        return False


def _is_same(copy: Path, source: Path) -> bool:
    return copy.samefile(source) or hash_file(copy) == source.name
