"""Shared by all tests: the cache folder stays inside the checkout, and is kept between runs.

The native core takes about a minute to build; a test that needs an empty cache sets COEXEC_CACHE_DIR itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("COEXEC_CACHE_DIR", str(ROOT / "out" / "test-cache"))
os.environ.setdefault("COEXEC_KEEP", "1")  # small tensors: whether co-execution pays is not what tests are about


@pytest.fixture(scope="session")
def native_core() -> None:
    """Steps co-execute from their first call on. (Imports are here: the tests of graphs do without torch.)"""
    from coexec.intercept.build import build
    from coexec.intercept.native import native_if_ready

    build(verbose=False)
    assert native_if_ready() is not None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny tensors, and for tests of several processes: spinning threads would wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
