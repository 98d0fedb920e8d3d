"""A tuned store as one file: complete on the way back, and refused whole if a single bit of it is not as signed."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from coexec.subgraphs import transfer
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.errors import StoreError, TrustError
from coexec.subgraphs.location import private_location, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.transfer import export_store, import_store
from coexec.subgraphs.trust import Keyring
from tests.subgraphs.samples import HERE, decision, elsewhere, key, measurement, publish, tuned

Change = Callable[[dict[str, bytes]], object]


@pytest.fixture
def target(tmp_path: Path, store: Store) -> Store:
    """Another machine, whose user trusts the exporter."""
    keyring = Keyring(tmp_path / "target-keys")
    keyring.trust(store.keyring.create())
    return Store(private_location(tmp_path / "target"), strict=True, keyring=keyring)


@pytest.fixture
def exported(store: Store, tmp_path: Path) -> Path:
    fill(store)
    file = tmp_path / "tuned.coexec"
    export_store(store, file)
    return file


def fill(store: Store) -> None:
    tuned(store, key("relu"), b"code 1", options={"threads": 2}, speedup=1.5, reason="fastest")
    tuned(store, key("relu", shape_class="s0<=8"), b"code 2")
    store.put_subgraph(key("gelu"), program=b"graph", note="segment 3")
    store.record_measurement(measurement(key("relu"), spread_s=0.1, eager_s=0.2), HERE)
    store.record_measurement(
        measurement(key("gelu"), "tvm", outcome=Outcome.TIMEOUT, median_s=None, detail="é\u2028"), HERE
    )


def contents(store: Store) -> dict[str, object]:
    return {
        "decisions": store.decisions(),
        "measurements": [store.measurements(info.digest) for info in sorted(store.subgraphs(), key=lambda i: i.digest)],
        "subgraphs": sorted((i.digest, i.text, i.note, i.n_ops, i.program) for i in store.subgraphs()),
        "environments": store.environments(),
        "files": sorted((digest, size) for digest, size, _ in store._open()[1].digests()),
    }


def test_an_export_comes_back_complete(store: Store, target: Store, exported: Path) -> None:
    report = import_store(target, exported)
    assert contents(target) == contents(store)
    assert (report.subgraphs, report.decisions, report.measurements, report.artifacts) == (2, 2, 2, 3)
    found = target.lookup(key("relu"), HERE)
    assert found is not None
    folder = target.checkout(found)
    assert folder is not None
    assert (folder / "model.so").read_bytes() == b"code 1"
    assert target.verify().ok  # type: ignore[union-attr]
    assert target.explain_miss(key("gelu", scale=3.0), HERE).startswith("nearest graph")


def test_importing_twice_changes_nothing(store: Store, target: Store, exported: Path) -> None:
    import_store(target, exported)
    report = import_store(target, exported)
    assert (report.decisions, report.kept) == (0, 2)
    assert contents(target) == contents(store)


def test_a_decision_made_here_is_kept_unless_told_otherwise(target: Store, exported: Path) -> None:
    mine = decision(key("relu"), "eager", decided_s=5.0)
    target.put_subgraph(key("relu"))
    target.decide(mine, HERE)
    assert import_store(target, exported).kept == 1
    assert target.lookup(key("relu"), HERE) == mine
    assert import_store(target, exported, overwrite=True).kept == 0
    assert target.lookup(key("relu"), HERE).backend == "onnxruntime"  # type: ignore[union-attr]


def test_an_export_can_be_of_one_environment_and_without_files(store: Store, target: Store, tmp_path: Path) -> None:
    fill(store)
    there = elsewhere(threads="1")
    store.decide(decision(key("relu"), "eager", environment=there.digest), there)
    report = export_store(store, tmp_path / "one", environment=HERE.digest, artifacts=False)
    assert (report.environments, report.decisions, report.artifacts) == (1, 2, 0)
    import_store(target, tmp_path / "one")
    assert {one.environment for one in target.decisions()} == {HERE.digest}
    recipe = target.lookup(key("relu"), HERE)
    assert recipe is not None
    assert (recipe.artifacts, recipe.options) == ((), {"threads": 2})


def test_a_team_can_take_an_export_into_its_shared_store(exported: Path, target: Store, tmp_path: Path) -> None:
    location = shared_location(f"sqlite:///{tmp_path}/team.sqlite", tmp_path / "cache")
    team = Store(location, strict=True, keyring=target.keyring)
    import_store(team, exported)
    found = team.lookup(key("relu"), HERE)
    assert found is not None
    assert team.checkout(found)
    assert team.verify().ok  # type: ignore[union-attr]


def test_an_export_is_published_whole_or_not_at_all(store: Store, tmp_path: Path) -> None:
    made = tuned(store, key())
    file = tmp_path / "tuned.coexec"
    export_store(store, file)
    before = file.read_bytes()
    store._open()[1].remove(made.artifacts[0].digest)
    with pytest.raises(StoreError, match="artifact"):
        export_store(store, file)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*coexec*")) == ["tuned.coexec"]


# Refusals ------------------------------------------------------------------------------------------------------------


def assert_refused(target: Store, file: Path, match: str) -> None:
    with pytest.raises(TrustError, match=match):
        import_store(target, file)
    assert contents(target) == {"decisions": (), "measurements": [], "subgraphs": [], "environments": {}, "files": []}


def rewritten(file: Path, change: Change) -> Path:
    """The archive with its parts changed, intact as a zip."""
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    altered = file.with_suffix(".altered")
    with zipfile.ZipFile(altered, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return altered


def artifact_of(parts: dict[str, bytes]) -> str:
    return next(name for name in parts if name.startswith("artifacts/"))


def test_an_export_of_a_stranger_is_refused(exported: Path, tmp_path: Path) -> None:
    stranger = Store(private_location(tmp_path / "s"), strict=True, keyring=Keyring(tmp_path / "s-keys"))
    assert_refused(stranger, exported, "not trusted")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda p: p.update({"records.jsonl": p["records.jsonl"].replace(b"onnxruntime", b"onnxruntimf")}),
            "records.jsonl",
        ),
        (lambda p: p.update({artifact_of(p): p[artifact_of(p)][:-1] + b"?"}), "does not match the manifest"),
        (lambda p: p.update({artifact_of(p): p[artifact_of(p)] + b"more"}), "bytes, the manifest says"),
        (lambda p: p.pop(artifact_of(p)), "altered"),
        (lambda p: p.update({"../../evil": b"x"}), "altered"),
        (lambda p: p.update({"artifacts/" + "a" * 64: b"x"}), "altered"),
        (lambda p: p.pop("manifest.sig"), "no manifest"),
        (lambda p: p.pop("manifest.json"), "no manifest"),
        (lambda p: p.update({"manifest.json": p["manifest.json"].replace(b'"format":1', b'"format":2')}), "forged"),
        (lambda p: p.update({"manifest.sig": b"[]"}), "not readable"),
        (lambda p: p.update({"manifest.sig": b'{"key_id":"' + b"a" * 64 + b'","value":""}'}), "not trusted"),
    ],
)
def test_an_altered_export_is_refused_whole(change: Change, match: str, exported: Path, target: Store) -> None:
    assert_refused(target, rewritten(exported, change), match)


def test_every_single_flipped_bit_is_refused_or_harmless(exported: Path, target: Store, store: Store) -> None:
    """Over the whole file, the zip's own bookkeeping included: an import takes all of it unchanged, or nothing."""
    content = exported.read_bytes()
    altered = exported.with_suffix(".flipped")
    refused = 0
    for position in range(0, len(content), 97):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        altered.write_bytes(bytes(flipped))
        try:
            import_store(target, altered)
        except TrustError:
            refused += 1
        else:
            assert contents(target) == contents(store), position
            shutil.rmtree(target.location.folder)
    assert refused > len(range(0, len(content), 97)) / 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"x" * 1000])
def test_what_is_no_export_is_refused(content: bytes, tmp_path: Path, target: Store) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert_refused(target, file, "no intact export")


def test_a_truncated_export_is_refused(exported: Path, target: Store) -> None:
    exported.write_bytes(exported.read_bytes()[:-30])
    assert_refused(target, exported, "no intact export")


def test_two_parts_of_one_name_are_refused(exported: Path, target: Store) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(exported, "a") as archive:
        warnings.simplefilter("ignore", UserWarning)  # zipfile's own, about the name we double on purpose
        archive.writestr("records.jsonl", b"{}")
    assert_refused(target, exported, "two parts of one name")


def test_a_compressed_bomb_is_refused_before_it_is_unpacked(exported: Path, target: Store) -> None:
    with zipfile.ZipFile(exported) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    size = json.loads(parts["manifest.json"])["parts"]["records.jsonl"]["size"]
    with zipfile.ZipFile(exported, "w") as archive:
        for name, content in parts.items():
            kind = zipfile.ZIP_DEFLATED if name == "records.jsonl" else zipfile.ZIP_STORED
            archive.writestr(name, b"0" * size if name == "records.jsonl" else content, kind)
    assert_refused(target, exported, "altered")


def test_an_endless_manifest_is_not_read_to_its_end(
    exported: Path, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_UNTRUSTED_LIMIT_BYTES", 100)
    assert_refused(target, exported, "larger than 100 bytes")


def sign_again(target: Store, store: Store, file: Path, change: Change) -> Path:
    """An archive by a trusted but mistaken writer: altered, then properly signed."""

    def resign(parts: dict[str, bytes]) -> None:
        change(parts)
        signature = store.keyring.sign(transfer._manifest_statement(parts["manifest.json"]))
        assert signature is not None
        parts["manifest.sig"] = json.dumps({"key_id": signature.key_id, "value": signature.value}).encode()

    return rewritten(file, resign)


def with_path(parts: dict[str, bytes]) -> None:
    manifest = json.loads(parts["manifest.json"])
    manifest["parts"]["../evil"] = {
        "size": 1,
        "sha256": hashlib.sha256(b"x").hexdigest(),
    }
    parts["manifest.json"], parts["../evil"] = json.dumps(manifest).encode(), b"x"


def with_format(parts: dict[str, bytes]) -> None:
    parts["manifest.json"] = parts["manifest.json"].replace(b'"format":1', b'"format":2')


@pytest.mark.parametrize(("change", "match"), [(with_path, "no export writes"), (with_format, "upgrade coexec")])
def test_even_a_signed_archive_must_be_as_an_export_writes_it(
    change: Change,
    match: str,
    exported: Path,
    target: Store,
    store: Store,
    tmp_path: Path,
) -> None:
    assert_refused(target, sign_again(target, store, exported, change), match)
    assert not (tmp_path / "evil").exists()


def test_an_artifact_name_that_leaves_its_folder_cannot_even_be_written(store: Store) -> None:
    with pytest.raises(ValueError, match="artifact name"):
        publish(store, b"x", "../evil")
