"""Nothing leaks: tensors die when eager's would, memory stays flat, threads and processes end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from coexec.config import settings
from tests.coexec.harness import exact
from tests.coexec.programs import batch, labels, mlp, training


def test_inputs_and_results_die_with_their_last_reference() -> None:
    @exact
    def step(x: torch.Tensor) -> Any:
        h = x * 2
        return h.sum(), h[0]

    for i in range(8):
        x = batch(i)
        result = step(x)
        refs = [weakref.ref(t) for t in (x, *result)]
        storages = [weakref.ref(t.untyped_storage()) for t in (x, *result)]
        del x, result
        assert [r() for r in refs] == [None] * 3, i
        assert [r() for r in storages] == [None] * 3, i


def test_intermediate_values_die_during_the_step() -> None:
    alive: list[int] = []

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        refs = []
        for _ in range(5):
            x = x + 1
            refs.append(weakref.ref(x))
        alive.append(sum(r() is not None for r in refs))
        return x

    for i in range(6):
        step(batch(i))
    assert alive == [1] * 6


def test_a_model_and_its_step_are_collected_together() -> None:
    model = mlp()
    step = exact(training(model, torch.optim.Adam(model.parameters())))
    for i in range(5):
        step(batch(i), labels(i))
    refs = [weakref.ref(model), weakref.ref(step), weakref.ref(next(model.parameters()))]
    del model, step
    gc.collect()
    assert [r() for r in refs] == [None] * 3


def test_graph_threads_end_with_their_steps() -> None:
    def native_threads() -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("Threads:"))

    gc.collect()
    before, python_before = native_threads(), threading.active_count()
    steps = [exact(lambda x: x * 2) for _ in range(6)]
    for s in steps:
        for i in range(4):
            s(batch(i))
    assert native_threads() >= before + 6
    del s, steps
    gc.collect()
    assert native_threads() <= before
    assert threading.active_count() == python_before


def rss_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


needs_real_frees = pytest.mark.skipif(bool(settings().sanitize), reason="the sanitizer keeps freed memory for a while")


@needs_real_frees
def test_resident_memory_is_flat_over_many_steps() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    calls = [0]

    @exact
    def step(x: torch.Tensor) -> float:
        calls[0] += 1
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        if calls[0] % 3 == 0:
            loss = loss + model(x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for i in range(60):
        step(batch(i, 64, 64))
    gc.collect()
    before = rss_bytes()
    for i in range(240):
        step(batch(i, 64, 64))
    gc.collect()
    assert rss_bytes() - before < 4 << 20


@needs_real_frees
def test_resident_memory_is_flat_when_every_step_falls_back() -> None:
    calls = [0]

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        h = x @ x
        if calls[0] % 2:
            raise ValueError
        return h

    def call(i: int) -> None:
        with contextlib.suppress(ValueError):
            step(batch(0, 128, 128))

    for i in range(50):
        call(i)
    gc.collect()
    before = rss_bytes()
    for i in range(300):
        call(i)
    gc.collect()
    assert rss_bytes() - before < 4 << 20


def run_child(body: str) -> subprocess.CompletedProcess[str]:
    program = "import os, sys, threading, torch, coexec\ntorch.set_num_threads(1)\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_process_with_live_steps_exits_cleanly() -> None:
    child = run_child("""
        steps = [coexec.compile(lambda x: (x * 2).sum(), backend="replay", numerics="exact") for _ in range(3)]
        kept = [s(torch.ones(3)) for s in steps for _ in range(5)]
        print(steps[0].stats().phase)
    """)
    assert (child.returncode, child.stdout.strip(), child.stderr.strip()) == (0, "co-execution", "")


def test_exit_in_the_middle_of_a_step() -> None:
    child = run_child("""
        @coexec.compile(backend="replay", numerics="exact")
        def step(x, leave):
            h = x
            for _ in range(50):
                h = torch.tanh(h @ x)
            if leave:
                sys.exit(7)
            return h
        for i in range(6):
            step(torch.eye(50), i == 5)
    """)
    assert (child.returncode, child.stderr.strip()) == (7, "")


def test_an_uncaught_exception_ends_the_process_as_usual() -> None:
    child = run_child("""
        @coexec.compile(backend="replay", numerics="exact")
        def step(x, bad):
            h = x * 2
            if bad:
                raise RuntimeError("the user's own")
            return h
        for i in range(6):
            step(torch.ones(3), i == 5)
    """)
    assert child.returncode == 1
    assert child.stderr.strip().endswith("RuntimeError: the user's own")


def test_atexit_handlers_may_use_steps_and_their_results() -> None:
    child = run_child("""
        import atexit
        step = coexec.compile(lambda x: (x * 2).sum(), backend="replay", numerics="exact")
        kept = [step(torch.ones(3)) for _ in range(5)]
        atexit.register(lambda: print(kept[-1].item(), step(torch.ones(4)).item()))
    """)
    assert (child.returncode, child.stdout.strip(), child.stderr.strip()) == (0, "6.0 8.0", "")


def test_interrupts_at_any_moment_leave_the_process_usable() -> None:
    child = run_child("""
        import random, signal
        w = torch.zeros(4)
        @coexec.compile(backend="replay", numerics="exact")
        def step(x):
            for _ in range(5):
                x = torch.tanh(x)
            w.add_(1)
            return x.sum()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        random.seed(0)
        interrupted = 0
        for i in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4))
                step(torch.ones(4))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
        before = w.clone()
        for _ in range(20):
            step(torch.ones(4))
        assert torch.equal(w, before + 20), (w, before)
        assert interrupted > 20
        print(step.stats().phase)
    """)
    assert (child.returncode, child.stdout.strip(), child.stderr.strip()) == (0, "co-execution", "")


def test_recorded_values_hold_no_user_objects() -> None:
    class Marker:
        pass

    marker = Marker()
    ref = weakref.ref(marker)

    @exact
    def step(x: torch.Tensor, extra: Any) -> torch.Tensor:
        return x * 2

    for i in range(6):
        step(batch(i), marker)
    del marker
    gc.collect()
    assert ref() is None
