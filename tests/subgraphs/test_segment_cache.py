"""Compiled segments travel through the store: another folder, process or machine gets what one has compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from coexec.backends.cache import Artifact, Failure
from coexec.backends.key import artifact_key, key_text
from coexec.subgraphs.segment_cache import BACKEND, SegmentCache, environment_of_segments, key_of_segment
from coexec.subgraphs.store import Store
from tests.backends.test_spec import small_spec

TEXT, KEY = key_text(small_spec()), artifact_key(small_spec())


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "segment.so"
    path.parent.mkdir()
    path.write_bytes(b"machine code")
    path.with_suffix(".json").write_text('{"nodes": []}')
    return path


def compiled(store: Store, root: Path, library: Path) -> SegmentCache:
    """A cache that has compiled the segment and published it."""
    cache = SegmentCache(store, root)
    assert cache.publish(cache.put(KEY, TEXT, library, {"verified": True}))
    return cache


def test_the_workers_key_is_the_stores_digest() -> None:
    key = key_of_segment(TEXT)
    assert key.digest == KEY
    assert key.n_ops == len(small_spec().ops)


def test_another_folder_gets_the_segment_from_the_store(store: Store, tmp_path: Path, library: Path) -> None:
    compiled(store, tmp_path / "one", library)
    other = SegmentCache(store, tmp_path / "two")
    found = other.get(KEY)
    assert isinstance(found, Artifact)
    assert found.library.read_bytes() == b"machine code"
    assert found.library.with_suffix(".json").read_text() == '{"nodes": []}'
    assert found.meta == {"verified": True}
    assert found.library.is_relative_to(tmp_path / "two")  # a copy of its own: the next look needs no store
    assert other.counters["from the store"] == 1
    other.get(KEY)
    assert other.counters["from the store"] == 1


def test_it_is_a_decision_as_any_other(store: Store, tmp_path: Path, library: Path) -> None:
    compiled(store, tmp_path / "one", library)
    decision = store.lookup(key_of_segment(TEXT), environment_of_segments())
    assert decision is not None
    assert decision.backend == BACKEND
    (info,) = store.subgraphs()
    assert info.note == f"segment of {len(small_spec().ops)} ops"
    assert info.program == ""  # the tuner leaves it alone


def test_a_damaged_one_is_compiled_again(store: Store, serving: Store, tmp_path: Path, library: Path) -> None:
    compiled(store, tmp_path / "one", library)
    decision = store.lookup(key_of_segment(TEXT), environment_of_segments())
    assert decision is not None
    path = store.open_artifact(next(ref for ref in decision.artifacts if ref.name == "segment.so"))
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"Machine code")
    assert SegmentCache(serving, tmp_path / "two").get(KEY) is None
    assert serving.counters()["fault.artifact damaged"] == 1


def test_a_teammates_segment_needs_a_trusted_signature(
    shared: Store, teammate: Store, tmp_path: Path, library: Path
) -> None:
    compiled(shared, tmp_path / "one", library)
    lenient = Store(teammate.location, keyring=teammate.keyring)
    assert SegmentCache(lenient, tmp_path / "two").get(KEY) is None
    assert lenient.counters()["fault.untrusted"] == 1


def test_failures_stay_on_this_machine(store: Store, tmp_path: Path) -> None:
    cache = SegmentCache(store, tmp_path / "one")
    cache.put_failure(KEY, TEXT, "timeout", "a busy afternoon")
    assert isinstance(cache.get(KEY), Failure)
    assert SegmentCache(store, tmp_path / "two").get(KEY) is None
    assert store.subgraphs() == ()


def test_what_the_folder_has_is_published_once_in_the_background(
    serving: Store, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(SegmentCache, "publish", lambda self, artifact: calls.append(artifact.key))
    cache = SegmentCache(serving, tmp_path / "one")
    cache.put(KEY, TEXT, library, {})
    for _ in range(3):
        assert isinstance(cache.get(KEY), Artifact)
    assert calls == [KEY]
