"""What may be believed: a folder that only its user can write, and Ed25519 signatures of keys that the user trusts.

An artifact is native code, and a decision says which one to load and with which options: both count as code. In a
private folder they are as safe as the user's own files. Anywhere else (a team's database, an imported file) each
carries a signature over one statement, and a statement names everything that must not be recombined: a valid artifact
attached to another graph is a forgery too. Weakness: an old statement of a trusted key stays valid (nothing stops a
writer of the database from restoring last week's decision); the only revocation is to remove the key.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coexec.subgraphs.errors import TrustError

_DOMAIN = b"coexec statement 1\0"  # no signature made for another program or format can be replayed here

SIGNING_KEY = "signing_key"
TRUSTED_KEYS = "trusted_keys"


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature and who made it."""

    key_id: str  # SHA-256 of the raw public key, 64 hex digits
    value: str  # base64 of the 64 signature bytes


def ensure_private_folder(folder: Path) -> None:
    """Create `folder` with mode 0700, or check that it is this user's and that nobody else could write to it.

    Errors: TrustError if it is a link, belongs to another user, or is writable by others: whatever lies in it may have
    been planted. OSError if it cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        _check_owner(folder, status)
        if stat.S_IMODE(status.st_mode) & 0o077:
            _close(folder)  # others could read it, not write it: nothing was planted


def ensure_trusted_parent(folder: Path) -> None:
    """Create the folder that a private one lies in, or check that others cannot put another one in its place.

    It may be a link of the user's, and others may read it. Errors: TrustError, OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, folder.stat())


def _close(folder: Path) -> None:
    # Not ours to close: a read-only medium, or root's folder in a container image. Nobody else can write there either.
    with contextlib.suppress(OSError):
        folder.chmod(0o700)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise TrustError(f"{path} is a symbolic link; remove it, or set COEXEC_CACHE_DIR to a folder of your own")
    if hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid()):  # root could replace this process anyway
        raise TrustError(
            f"{path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}; compiled code from it could "
            "be anybody's. Set COEXEC_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TrustError(
            f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):04o}), so what is in it cannot be "
            f"trusted; delete it, or if you know its content: chmod 700 {path}"
        )


def statement_bytes(statement: Mapping[str, object]) -> bytes:
    """The one byte string that stands for a statement: JSON with sorted keys. Errors: ValueError for nan."""
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return _DOMAIN + text.encode()


class Keyring:
    """A user's signing key and the public keys the user trusts, in one private folder.

    `signing_key`: 32 raw bytes in base64, mode 0600. `trusted_keys`: one line per key, "<base64 public key> <who>",
    `#` comments. One's own key is trusted. The files are read at each use.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else default_keys_folder()

    def create(self) -> str:
        """Make a signing key unless there is one; returns the public key in base64, to be given to others."""
        ensure_private_folder(self.folder)
        path = self.folder / SIGNING_KEY
        raw = Ed25519PrivateKey.generate().private_bytes_raw()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return self.public_key()
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(raw) + b"\n")
        return self.public_key()

    def public_key(self) -> str:
        """The own public key in base64. Errors: TrustError if there is no signing key."""
        key = self._signing_key()
        if key is None:
            raise TrustError(f"there is no signing key in {self.folder}; make one with `coexec db key --create`")
        return base64.b64encode(key.public_key().public_bytes_raw()).decode()

    def trust(self, public_key: str, who: str = "") -> str:
        """Trust what `public_key` (base64) signs from now on; returns its key id. Errors: TrustError for a bad key."""
        identity = key_id(_decode_public(public_key))
        ensure_private_folder(self.folder)
        if identity not in self.trusted():
            descriptor = os.open(self.folder / TRUSTED_KEYS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{public_key.strip()} {' '.join(who.split())}\n")
        return identity

    def trusted(self) -> dict[str, Ed25519PublicKey]:
        """Trusted keys by key id, the own key included. Lines that are no key are skipped."""
        keys = {}
        for line in self._read(TRUSTED_KEYS).splitlines():
            word = line.split("#")[0].split(" ")[0].strip()
            try:
                raw = _decode_public(word)
            except TrustError:
                continue
            keys[key_id(raw)] = Ed25519PublicKey.from_public_bytes(raw)
        own = self._signing_key()
        if own is not None:
            keys[key_id(own.public_key().public_bytes_raw())] = own.public_key()
        return keys

    def sign(self, statement: Mapping[str, object]) -> Signature | None:
        """Sign `statement` with the own key; None without one."""
        key = self._signing_key()
        if key is None:
            return None
        value = base64.b64encode(key.sign(statement_bytes(statement))).decode()
        return Signature(key_id(key.public_key().public_bytes_raw()), value)

    def check(self, statement: Mapping[str, object], signature: Signature | None) -> None:
        """Errors: TrustError unless a trusted key has signed exactly `statement`."""
        if signature is None:
            raise TrustError(f"{_title(statement)} is not signed; its writer needs a key: `coexec db key --create`")
        key = self.trusted().get(signature.key_id)
        if key is None:
            raise TrustError(
                f"{_title(statement)} is signed by key {signature.key_id[:16]}, which is not trusted; "
                "if you know its owner: `coexec db key --trust PUBLIC_KEY`"
            )
        try:
            key.verify(base64.b64decode(signature.value, validate=True), statement_bytes(statement))
        except (InvalidSignature, binascii.Error, ValueError) as error:
            raise TrustError(f"{_title(statement)} does not match its signature: it was altered or forged") from error

    def _signing_key(self) -> Ed25519PrivateKey | None:
        text = self._read(SIGNING_KEY)
        if not text:
            return None
        try:
            return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text.strip(), validate=True))
        except (binascii.Error, ValueError) as error:
            path = self.folder / SIGNING_KEY
            raise TrustError(f"{path} is no key ({error}); move it away and make a new one") from error

    def _read(self, name: str) -> str:
        """The file's text, "" if it does not exist. Errors: TrustError if others could have written it."""
        path = self.folder / name
        try:
            _check_owner(self.folder, self.folder.lstat())
            _check_owner(path, path.lstat())
            return path.read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""


def default_keys_folder() -> Path:
    """`~/.config/coexec/keys`: outside the cache, which people delete."""
    return Path("~/.config/coexec/keys").expanduser()


def key_id(raw_public_key: bytes) -> str:
    """SHA-256 of the raw public key: how a signature names its maker."""
    return hashlib.sha256(raw_public_key).hexdigest()


def public_bytes(key: Ed25519PublicKey) -> bytes:
    """The raw 32 bytes of a public key."""
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _decode_public(text: str) -> bytes:
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise TrustError(f"{text[:80]!r} is no public key: expected 44 characters of base64 (32 bytes)")
    return raw


def _title(statement: Mapping[str, object]) -> str:
    identity = str(statement.get("subgraph") or statement.get("artifact") or statement.get("manifest") or "")
    return f"{statement.get('kind', 'statement')} {identity[:16]}".strip()
