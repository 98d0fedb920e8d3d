"""Artifacts by key: what is stored comes back, what is damaged is a miss, and the key tells everything apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coexec.backends import key as key_module
from coexec.backends.cache import FAILURE_KINDS, Artifact, ArtifactCache, CacheWriteError, Failure
from coexec.backends.key import artifact_key, key_text
from coexec.config import private_cache_dir
from tests.backends.test_spec import small_spec

KEY = "ab" + "0" * 62


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "segment.so"
    path.parent.mkdir()
    path.write_bytes(b"machine code")
    path.with_suffix(".json").write_text('{"nodes": []}')
    return path


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def test_an_artifact_comes_back_with_its_custom_ops_and_its_meta(cache: ArtifactCache, library: Path) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, "text", library, {"verified": True, "report": {"ratio": 1.5}})
    found = ArtifactCache(cache.root()).get(KEY)
    assert isinstance(found, Artifact)
    assert found.library.read_bytes() == b"machine code"
    assert json.loads(found.library.with_suffix(".json").read_text()) == {"nodes": []}
    assert found.meta["report"]["ratio"] == 1.5
    assert (found.library.parent / "key.txt").read_text() == "text"
    assert cache.counters == {"miss": 1}


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_failures_are_remembered_with_their_reason(kind: str, cache: ArtifactCache, library: Path) -> None:
    cache.put_failure(KEY, "text", kind, "because", {"op": "x"})
    found = ArtifactCache(cache.root()).get(KEY)
    assert found == Failure(KEY, kind, "because", {"op": "x"})
    cache.put(KEY, "text", library, {})
    assert isinstance(cache.get(KEY), Artifact)
    cache.forget(KEY)
    assert cache.get(KEY) is None


@pytest.mark.parametrize("name", ["segment.so", "segment.json", "meta.json", "SHA256SUMS", "key.txt"])
@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_a_damaged_entry_is_a_counted_miss(name: str, damage: str, cache: ArtifactCache, library: Path) -> None:
    file = cache.put(KEY, "text", library, {"a": 1}).library.parent / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "truncated" else file.read_bytes()[:-1] + b"?")
    assert cache.get(KEY) is None
    assert sum(cache.counters.values()) == 1
    cache.put(KEY, "text", library, {"a": 1})
    assert isinstance(cache.get(KEY), Artifact)


def test_a_folder_open_to_others_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    folder = private_cache_dir("segments")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    cache = ArtifactCache()
    assert cache.get(KEY) is None
    assert "can be written by others" in next(iter(cache.counters))
    with pytest.raises(CacheWriteError, match="can be written by others"):
        cache.put(KEY, "text", tmp_path / "segment.so", {})
    cache.put_failure(KEY, "text", "wrong", "counted, no error")
    assert len(cache.counters) == 2


def test_the_folder_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: Path) -> None:
    cache = ArtifactCache()
    for name in ("one", "two"):
        monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / name))
        assert cache.get(KEY) is None
        assert tmp_path / name in cache.put(KEY, "text", library, {}).library.parents


def test_a_full_disk_leaves_nothing_behind(
    cache: ArtifactCache, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(CacheWriteError, match="No space left"):
        cache.put(KEY, "text", library, {})
    assert [p for p in cache.root().rglob("*") if p.is_file()] == []


WRITER = """
import sys
from pathlib import Path
from coexec.backends.cache import ArtifactCache
root, library, key = sys.argv[1:]
for _ in range(60):
    ArtifactCache(Path(root)).put(key, "text", Path(library), {})
"""


def test_readers_see_a_whole_entry_or_none_while_others_write(cache: ArtifactCache, library: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WRITER, str(cache.root()), str(library), KEY]
    writers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        reads += cache.get(KEY) is not None
    assert [writer.wait() for writer in writers] == [0, 0]
    assert reads > 0
    assert isinstance(cache.get(KEY), Artifact)
    assert not [name for name in cache.counters if name.startswith("corrupted")]
    assert [p.name for p in (cache.root() / KEY[:2]).iterdir()] == [KEY]


def test_the_key_names_everything_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec()
    text = key_text(spec)
    assert {line.split(":")[0] for line in text.splitlines()[1:5]} == {"torch", "cpu", "compiler", "lowering"}
    keys = {artifact_key(spec), artifact_key(replace(spec, threads=2)), artifact_key(replace(spec, mode="commit"))}
    for entry in key_module.environment():
        changed = {**key_module.environment(), entry: "other"}
        monkeypatch.setattr(key_module, "environment", lambda changed=changed: changed)
        keys.add(artifact_key(spec))
        monkeypatch.undo()
    assert len(keys) == 3 + 4
    assert artifact_key(small_spec(first=9, swap=True)) == artifact_key(spec)


def test_every_lowering_file_exists_and_counts() -> None:
    folder = Path(key_module.__file__).parent
    assert all((folder / name).is_file() for name in key_module.LOWERING_FILES)
    missing = {p.name for p in folder.glob("*.py")} - set(key_module.LOWERING_FILES)
    # What is left out decides whether an artifact is used, not what it computes: indices are looked at before the
    # artifact runs, and a variant's settings are in its decision.
    assert missing == {
        "__init__.py", "cache.py", "graph_indices.py", "index_part.py", "index_ranges.py", "index_sources.py", "key.py",
        "leftovers.py", "reference.py", "segment_program.py", "snapshot.py", "spec.py", "variants.py", "verify.py",
        "worker.py", "worker_main.py",
    }  # fmt: skip
