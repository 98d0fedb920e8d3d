"""What `coexec tune` decides about a segment serves in the next process, once it was right on live inputs there."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import coexec
from coexec import choose
from coexec.backends import variants
from coexec.backends.worker import CompileWorker
from coexec.config import private_cache_dir
from coexec.runtime import compile_jobs
from coexec.subgraphs.entries import SubgraphInfo
from coexec.subgraphs.store import Store, open_store
from coexec.tuning import TuneSettings, tune
from tests.tuning import planted_variants
from tests.tuning.planted_variants import PREFIX, climbing_back

pytestmark = pytest.mark.compile

QUICK = TuneSettings(attempt_s=120.0, rounds=(3, 5), busy_retries=0, threads=1)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store and an empty folder of segments; what compilers keep stays where it is."""
    compilers, cache = private_cache_dir("inductor"), tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "inductor").symlink_to(compilers)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(cache))
    monkeypatch.setattr(compile_jobs, "_worker", None)
    (tmp_path / "variants").mkdir()
    with planted_variants.installed(tmp_path / "variants"):
        yield open_store(strict=True)
    _end_worker()


def _end_worker() -> None:
    if compile_jobs._worker is not None:
        compile_jobs._worker.close()


def explained_by_a_new_process() -> tuple[str, dict[str, int]]:
    """What explain() says of a step that has settled, and what its cache counted: both anew, as in a new process."""
    _end_worker()
    for thread in threading.enumerate():  # a process that is gone writes nothing any more
        if thread.name in ("coexec-publish", "coexec-note-runs"):
            thread.join(30)
    cache = choose.segment_cache()
    compile_jobs._worker = CompileWorker(cache)
    step = coexec.compile(climbing_back)
    for i in range(60):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(step(x), x + 1.0, rtol=1e-4, atol=1e-4)
        if i in (20, 40):
            assert step.wait_compiled(300)
    return step.explain(), dict(cache.counters)


def segment_of(store: Store) -> SubgraphInfo:
    """The one segment, once it is published."""
    deadline_s = time.monotonic() + 30
    while not store.decisions() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    (info,) = store.subgraphs()
    assert info.program
    return info


def test_the_next_process_adopts_what_was_tuned(store: Store) -> None:
    explained, _ = explained_by_a_new_process()
    assert "inductor" in explained
    assert "tuned" not in explained
    info = segment_of(store)
    digest = info.digest
    assert f"`coexec db show {digest[:16]}`" in explained
    assert re.fullmatch(rf"climbing_back, planted_variants\.py:\d+: segment of {info.n_ops} ops", info.note)
    (graph,) = tune(store, QUICK, candidates=(PREFIX + "compiled",), subgraphs=(digest,)).graphs
    assert graph.subgraph == digest
    assert graph.winner == PREFIX + "compiled"
    explained, counted = explained_by_a_new_process()
    assert f"inductor (tuned: {PREFIX}compiled:" in explained, explained
    assert counted["from the store"] == 1
    explained, counted = explained_by_a_new_process()
    assert f"(tuned: {PREFIX}compiled:" in explained  # at once: it was right on live inputs here
    assert "from the store" not in counted


@pytest.mark.slow
def test_a_library_that_does_not_load_ends_in_the_usual_one(store: Store) -> None:
    explained_by_a_new_process()
    digest = segment_of(store).digest
    (graph,) = tune(store, QUICK, candidates=(PREFIX + "faster",), subgraphs=(digest,)).graphs  # its library is garbage
    assert graph.winner == PREFIX + "faster"
    explained, _ = explained_by_a_new_process()
    assert "inductor" in explained
    assert "tuned" not in explained
    _, counted = explained_by_a_new_process()
    assert counted["hit"]
    assert [decision.backend for decision in store.decisions(digest)] in ([variants.USUAL], [])
