"""A tuned store as one file: export on the machine that tuned, import where a fleet must start warm.

The file is a zip, its parts stored uncompressed: `manifest.json` (what is inside, with size and SHA-256 of every part),
`manifest.sig` (the signature of exactly those bytes), `records.jsonl` and `artifacts/<digest>`. An import believes
nothing before the signature of a trusted key and every hash have been checked, and never uses a part's name as a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coexec.subgraphs import interchange
from coexec.subgraphs.artifacts import CHUNK_BYTES
from coexec.subgraphs.entries import Decision, canonical_json, is_digest
from coexec.subgraphs.environment import environment_of_text
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.interchange import Records, load_records
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Signature

FORMAT = 1
MANIFEST, SIGNATURE, RECORDS, ARTIFACTS = "manifest.json", "manifest.sig", "records.jsonl", "artifacts/"
_UNTRUSTED_LIMIT_BYTES = 64 << 20  # the most that is read into memory before anything is trusted


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What an export wrote or an import took."""

    subgraphs: int
    environments: int
    decisions: int
    measurements: int
    artifacts: int
    artifact_bytes: int
    kept: int  # decisions the importing store had already, and kept


# Export --------------------------------------------------------------------------------------------------------------


def export_store(store: Store, file: Path, *, environment: str | None = None, artifacts: bool = True) -> TransferReport:
    """Write all that `store` trusts itself into `file`, signed with the user's key (which is made if there is none).

    `environment`: digest; only what belongs to it. `artifacts=False`: decisions without files, to be rebuilt from their
    options. Errors: StoreError, TrustError, OSError; `file` then does not exist or is as before.
    """
    strict = Store(store.location, strict=True, keyring=store.keyring)
    strict.keyring.create()
    records, lines = _collect(strict, environment, artifacts)
    files = {digest: _content(strict, digest) for digest in sorted(records.artifact_digests())} if artifacts else {}
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.part")
    try:
        _write_archive(strict, temporary, lines, files)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return _report(records, {digest: path.stat().st_size for digest, path in files.items()}, kept=0)


def _collect(store: Store, environment: str | None, artifacts: bool) -> tuple[Records, bytes]:
    """The records, read back from the very lines that are written: what cannot be read is not exported."""
    lines = list(_lines(store, environment, artifacts))
    return load_records("".join(lines)), "".join(lines).encode()


def _lines(store: Store, environment: str | None, artifacts: bool) -> Iterator[str]:
    for digest, text in store.environments().items():
        if environment in (None, digest):
            yield interchange.dump_environment(environment_of_text(text))
    for info, outline in store.subgraphs_with_outlines():
        with_program = artifacts and bool(info.program) and store.program(info.digest) is not None
        yield interchange.dump_subgraph(info, outline, with_program=with_program)
        for measurement in store.measurements(info.digest, environment):
            yield interchange.dump_measurement(measurement)
    for decision in store.decisions():
        if environment in (None, decision.environment):
            yield interchange.dump_decision(decision if artifacts else decision.recipe())


def _content(store: Store, digest: str) -> Path:
    path = store.open_artifact(digest)
    if path is None:
        raise StoreError(
            "artifact missing", f"artifact {digest[:16]} cannot be exported; run `coexec db verify --repair`"
        )
    return path


def _write_archive(store: Store, path: Path, records: bytes, files: dict[str, Path]) -> None:
    parts = {RECORDS: {"size": len(records), "sha256": hashlib.sha256(records).hexdigest()}}
    parts |= {f"{ARTIFACTS}{digest}": {"size": file.stat().st_size, "sha256": digest} for digest, file in files.items()}
    manifest = canonical_json(
        {"format": FORMAT, "created_s": time.time(), "public_key": store.keyring.public_key(), "parts": parts}
    ).encode()
    signature = store.keyring.sign(_manifest_statement(manifest))
    assert signature is not None, "the keyring has just made a key"
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        archive.writestr(MANIFEST, manifest)
        archive.writestr(SIGNATURE, canonical_json({"key_id": signature.key_id, "value": signature.value}))
        archive.writestr(RECORDS, records)
        for digest, file in files.items():
            archive.write(file, f"{ARTIFACTS}{digest}")


def _manifest_statement(manifest: bytes) -> dict[str, object]:
    return {"kind": "export", "manifest": hashlib.sha256(manifest).hexdigest()}


# Import --------------------------------------------------------------------------------------------------------------


def import_store(store: Store, file: Path, *, overwrite: bool = False) -> TransferReport:
    """Take everything of an exported file into `store`, after its signature and every hash were found good.

    A decision that `store` has already is kept (it was measured here) unless `overwrite`. An import that was killed is
    simply repeated. Errors: TrustError (nothing was taken), StoreError, OSError.
    """
    strict = Store(store.location, strict=True, keyring=store.keyring)
    try:
        with zipfile.ZipFile(file) as archive:
            parts = _checked_parts(strict, archive)
            records = load_records(_read_part(archive, RECORDS, parts[RECORDS]["size"]).decode())
            _check_references(records, parts)
            return _take(strict, archive, records, parts, overwrite)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError, RuntimeError) as error:
        if isinstance(error, StoreError | TrustError):
            raise
        raise TrustError(f"{file} is no intact export ({error}); export or copy it again") from error


def _checked_parts(store: Store, archive: zipfile.ZipFile) -> dict[str, Any]:
    """The manifest's parts, once the signature, the list of parts and every hash agree. Errors: TrustError."""
    names = [info.filename for info in archive.infolist()]
    if len(set(names)) != len(names) or not {MANIFEST, SIGNATURE} <= set(names):
        raise TrustError(
            "the archive has no manifest, or two parts of one name; it was not written by `coexec db export`"
        )
    manifest = _read_part(archive, MANIFEST, None)
    store.keyring.check(_manifest_statement(manifest), _signature_of(_read_part(archive, SIGNATURE, None)))
    parts = _parts_of(manifest)
    if set(names) != {MANIFEST, SIGNATURE, *parts}:
        raise TrustError(f"the archive holds {len(names)} parts, its manifest names {len(parts)}; it was altered")
    for name, part in parts.items():
        _check_part(archive, name, part)
    return parts


def _signature_of(content: bytes) -> Signature:
    try:
        fields = json.loads(content)
        return Signature(str(fields["key_id"]), str(fields["value"]))
    except (ValueError, KeyError, TypeError) as error:
        raise TrustError(f"the archive's signature is not readable ({error!r}); it was altered") from error


def _parts_of(manifest: bytes) -> dict[str, Any]:
    """The parts of a manifest whose signature is good; only its version may surprise."""
    fields = json.loads(manifest)
    if fields["format"] != FORMAT:
        raise TrustError(f"the archive has format {fields['format']}, this coexec reads {FORMAT}; upgrade coexec")
    parts: dict[str, Any] = fields["parts"]
    for name, part in parts.items():
        digest = name.removeprefix(ARTIFACTS)
        if name != RECORDS and not (name.startswith(ARTIFACTS) and is_digest(digest) and part["sha256"] == digest):
            raise TrustError(f"the archive has a part {name!r:.100}, which no export writes")
    return parts


def _check_part(archive: zipfile.ZipFile, name: str, part: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    for chunk in _chunks(archive, name, part["size"]):
        digest.update(chunk)
    if digest.hexdigest() != part["sha256"]:
        raise TrustError(f"part {name} does not match the manifest; it was altered or damaged on the way")


def _chunks(archive: zipfile.ZipFile, name: str, size: int) -> Iterator[bytes]:
    """The part in pieces, never more than `size` bytes (the compressed size of a bomb says nothing)."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != size:
        raise TrustError(f"part {name} has {info.file_size} bytes, the manifest says {size}; it was altered")
    with archive.open(info) as part:
        while chunk := part.read(CHUNK_BYTES):
            yield chunk


def _read_part(archive: zipfile.ZipFile, name: str, size: int | None) -> bytes:
    """The whole part; `size=None` before there is a manifest to say it."""
    if size is not None:
        return b"".join(_chunks(archive, name, size))
    with archive.open(name) as part:
        content = part.read(_UNTRUSTED_LIMIT_BYTES + 1)
    if len(content) > _UNTRUSTED_LIMIT_BYTES:
        raise TrustError(f"part {name} is larger than {_UNTRUSTED_LIMIT_BYTES} bytes; no export writes that")
    return content


def _check_references(records: Records, parts: dict[str, Any]) -> None:
    missing = {digest for digest in records.artifact_digests() if f"{ARTIFACTS}{digest}" not in parts}
    if missing:
        raise TrustError(f"the archive names {len(missing)} artifacts that it does not hold; export again")
    named = {decision.environment for decision in records.decisions}
    named |= {measurement.environment for measurement in records.measurements}
    strangers = named - records.environments.keys()
    if strangers:
        raise TrustError(f"the archive names {len(strangers)} environments that it does not describe; export again")


def _take(
    store: Store, archive: zipfile.ZipFile, records: Records, parts: dict[str, Any], overwrite: bool
) -> TransferReport:
    """Artifacts first: at no moment does a row name what is not there."""
    sizes = {name.removeprefix(ARTIFACTS): part["size"] for name, part in parts.items() if name != RECORDS}
    for digest, size in sizes.items():
        store.put_artifact(_chunks(archive, f"{ARTIFACTS}{digest}", size), expected=digest)
    for key, note, program in records.keys:
        store.put_subgraph(key, program=store.open_artifact(program) if program else None, note=note)
    present = {} if overwrite else {_place(decision): decision for decision in store.decisions()}
    kept = [decision for decision in records.decisions if _place(decision) in present]
    for decision in records.decisions:
        if _place(decision) not in present:
            store.decide(decision, records.environments[decision.environment])
    for measurement in records.measurements:
        store.record_measurement(measurement, records.environments[measurement.environment])
    return _report(records, sizes, len(kept))


def _place(decision: Decision) -> tuple[str, str, str, str]:
    return decision.subgraph, decision.environment, decision.shape_class, decision.constants


def _report(records: Records, sizes: dict[str, int], kept: int) -> TransferReport:
    return TransferReport(
        subgraphs=len(records.keys),
        environments=len(records.environments),
        decisions=len(records.decisions) - kept,
        measurements=len(records.measurements),
        artifacts=len(sizes),
        artifact_bytes=sum(sizes.values()),
        kept=kept,
    )
