"""One native build for all oracles; what runs in this process runs on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready


@pytest.fixture(scope="session", autouse=True)
def native_core() -> None:
    """The processes that oracles start find it in the cache."""
    build(verbose=False)
    assert native_if_ready() is not None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    coexec.reset()
