"""A library of the tuner takes over once it was right on live inputs; a wrong one is named instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coexec.backends.cache import REFUSED, Artifact, ArtifactCache, digest_of
from coexec.backends.key import artifact_key, key_text
from coexec.backends.snapshot import write_snapshot
from coexec.backends.worker_main import _check_and_store
from tests.backends.conftest import Compile
from tests.backends.recording import Recording, record

pytestmark = pytest.mark.compile


def adding(number: float) -> Recording:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    return record(lambda _: [x.sin() + number])


def checked(folder: Path, library: Path) -> tuple[dict[str, str], dict[str, object] | None, Artifact]:
    """What the compile process makes of `library` for `adding(1.0)`, and what the cache has then."""
    segment, cache = adding(1.0), ArtifactCache(folder / "segments")
    key, text = artifact_key(segment.spec), key_text(segment.spec)
    put = cache.put(key, text, library, {"verified": False, "backend": "coexec-segment-fma"})
    write_snapshot(folder / "live.json", segment.inputs, None)
    job = {"snapshots": [str(folder / "live.json")], "timed": False, "library": str(put.library)}
    refused, answer = _check_and_store(job, segment.spec, key, text, cache)
    known = cache.get(key)
    assert isinstance(known, Artifact)
    return refused, answer, known


def test_a_right_one_is_noted_as_checked(compiled: Compile, tmp_path: Path) -> None:
    refused, answer, known = checked(tmp_path, compiled(adding(1.0).spec).library)
    assert refused == {}
    assert answer is not None
    assert answer["failure"] is None
    assert known.is_checked
    assert known.meta["backend"] == "coexec-segment-fma"


def test_one_that_computes_something_else_is_refused(compiled: Compile, tmp_path: Path) -> None:
    library = compiled(adding(2.0).spec).library
    refused, answer, known = checked(tmp_path, library)
    assert refused == {REFUSED: digest_of(library)}
    assert answer is None
    assert not known.is_checked


def test_one_that_does_not_load_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "segment.so"
    library.write_bytes(b"no machine code")
    refused, answer, _ = checked(tmp_path, library)
    assert refused == {REFUSED: digest_of(library)}
    assert answer is None
