"""One native build for all oracles; what runs in this process runs on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import coexec


@pytest.fixture(autouse=True)
def small_and_ready(native_core: None, one_thread: None) -> Iterator[None]:
    """The processes that oracles start find the core in the cache; the tensors are tiny."""
    yield
    coexec.reset()
