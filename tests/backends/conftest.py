"""Compiled segments are kept in the cache folder, so that a second run of the tests compiles nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coexec.backends import publish
from coexec.backends.cache import Artifact, ArtifactCache
from coexec.backends.key import artifact_key, key_text
from coexec.backends.spec import SegmentSpec
from coexec.config import private_cache_dir


@pytest.fixture(scope="session", autouse=True)
def _make_room_for_the_native_core() -> Iterator[None]:
    """Tests of other folders load the native core, which defines the same op."""
    yield
    publish.unregister_publish()


Compile = Callable[[SegmentSpec], Artifact]


@pytest.fixture(scope="session")
def compiled() -> Compile:
    """Compiles a segment, or takes it from the cache."""
    cache = ArtifactCache(private_cache_dir("test-segments"))

    def compile_once(spec: SegmentSpec) -> Artifact:
        from coexec.backends.inductor import compile_segment

        known = cache.get(artifact_key(spec))
        if isinstance(known, Artifact):
            return known
        with tempfile.TemporaryDirectory() as folder:
            done = compile_segment(spec, Path(folder))
            meta = {**done.facts, "code": done.code}
            return cache.put(artifact_key(spec), key_text(spec), done.library, meta)

    return compile_once
