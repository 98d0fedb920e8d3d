"""One native build for all tests, one thread, and an end for tests that hang."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready
from tests.coexec.gate import Gate

HANG_S = 60.0  # a test of this folder takes a second or two


@pytest.fixture(scope="session", autouse=True)
def native_core() -> None:
    """Steps co-execute from the first call on: the build has tests of its own."""
    build(verbose=False)
    assert native_if_ready() is not None


@pytest.fixture(autouse=True)
def quiet_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small tensors on one thread; a deadlock shows where it hangs and ends the run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    limit_s = HANG_S if request.node.get_closest_marker("compile") is None else 10 * HANG_S
    uncaptured = request.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit_s, exit=True, file=uncaptured)
    yield
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(threads)
    coexec.reset()


@pytest.fixture(scope="module")
def the_gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.remove()


@pytest.fixture
def gate(the_gate: Gate) -> Iterator[Gate]:
    the_gate.delay_s = 0.0
    the_gate.open()
    yield the_gate
    the_gate.open()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Only a loop on several threads is a parallel region, which no exception can leave."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
