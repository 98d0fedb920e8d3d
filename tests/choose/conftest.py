"""A store of its own for each test, and the planted candidates of the tuner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coexec import choose
from coexec.subgraphs.store import Store, open_store
from tests.tuning.conftest import planted_candidates, planted_folder

__all__ = ["planted_candidates", "planted_folder"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code and no counts of an earlier test."""
    torch._dynamo.reset()
    choose.reset_counters()
    yield
    torch._dynamo.reset()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that the backend uses in this test, as a tool sees it."""
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    return open_store(strict=True)
