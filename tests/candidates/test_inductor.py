"""Inductor's forms: threads as asked, no leaked settings, no GIL held while kernels compute."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError, binds_static
from coexec.backends.candidates.core import draws_random, split
from coexec.backends.candidates.inductor import handles
from coexec.backends.candidates.inductor.compiled import compiling
from coexec.backends.candidates.inductor.handles import TIMED_CALLS, Library
from tests.candidates.checks import assert_same_as_eager, built
from tests.candidates.samples import handmade, program

SETTINGS = ("freezing", "cpp_wrapper", "max_autotune", "joint_custom_post_pass", "fallback_random", "fx_graph_cache")


def test_settings_are_put_back_and_those_another_package_left_behind_do_not_reach_the_graph() -> None:
    """zentorch leaves a pass in joint_custom_post_pass, which changes what every later graph becomes."""
    before = {name: getattr(config, name) for name in SETTINGS}
    core = split(program("mlp"))
    with config.patch(joint_custom_post_pass=lambda graph: graph):
        leaked = config.joint_custom_post_pass
        with compiling("inductor", core, {"freezing": True, "cpp_wrapper": True}, 1):
            assert config.joint_custom_post_pass is None
            assert (config.freezing, config.cpp_wrapper, config.cpp.threads) == (True, True, 1)
        assert config.joint_custom_post_pass is leaked
    with pytest.raises(CandidateError, match="broke"), compiling("inductor", core, {"max_autotune": True}, 1):
        raise RuntimeError("broke")
    assert {name: getattr(config, name) for name in SETTINGS} == before


def test_default_and_frozen_are_two_candidates() -> None:
    """Freezing is not always faster: packed weights lose with tiny matrices."""
    assert not registry.get("inductor").bakes_constants
    assert registry.get("inductor-freezing").bakes_constants
    assert registry.get("inductor").options_in_key() != registry.get("inductor-freezing").options_in_key()


def test_random_ops_are_told_apart_and_left_to_torch(tmp_path: Path) -> None:
    assert not draws_random(program("mlp").module)
    assert not draws_random(program("attention").module), "its kernel is tagged as random, and its dropout is off"
    noisy = handmade(lambda x: (torch.nn.functional.dropout(x, 0.5),), (torch.randn(8),))
    assert draws_random(noisy.module)
    for name in ("onnxruntime", "openvino", "tvm"):
        if registry.get(name).availability().usable:
            with pytest.raises(CandidateError, match="random numbers"):
                registry.get(name).build(noisy, tmp_path, threads=1, budget_s=1)


@pytest.mark.compile
def test_code_is_for_the_threads_that_will_serve(stored: Callable[..., Any], tmp_path: Path) -> None:
    """Inductor writes the count into the code unless it is the machine's: built for one, it must say one."""
    artifact = stored("inductor")
    source = (artifact.folder / "wrapper.py").read_text()
    assert set(re.findall(r"num_threads\((\d+)\)", source)) <= {"1"}
    assert "pickle" not in source
    pointwise = handmade(lambda x: (torch.sin(x) * 2 + torch.cos(x),), (torch.randn(1 << 20),))
    built(registry.get("inductor"), pointwise, tmp_path, threads=3)
    assert "num_threads(3)" in (tmp_path / "wrapper.py").read_text()


@pytest.mark.compile
@pytest.mark.parametrize("name", ["inductor", "inductor-cpp-wrapper", "aotinductor"])
def test_other_python_threads_run_during_a_call(name: str, tmp_path: Path) -> None:
    """The stock bindings of the first and the last hold the GIL: the counting thread would see one long gap."""
    slow = handmade(lambda x: (torch.sin(torch.exp(torch.tanh(torch.sin(x)) * torch.cos(x))),), (torch.randn(1 << 24),))
    run = built(registry.get(name), slow, tmp_path, threads=1)
    run(*slow.inputs)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    run(*slow.inputs)
    ended = time.perf_counter()
    done.set()
    thread.join()
    inside = [began, *(t for t in ticks if began < t < ended), ended]
    gap = max(b - a for a, b in itertools.pairwise(inside))
    assert len(inside) > 4
    assert gap < 0.7 * (ended - began), f"another thread stood still for {gap:.3f} s of {ended - began:.3f} s"


@pytest.mark.compile
def test_a_call_that_is_short_is_made_without_handles_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letting go of the GIL costs more than a small graph computes."""
    small = handmade(lambda x, y: (torch.sin(x) + y, x.cos()), (torch.randn(8), torch.randn(8)))
    run = built(registry.get("aotinductor"), small, tmp_path, threads=1)
    calls = [run(*small.inputs) for _ in range(TIMED_CALLS + 3)]
    for x, y in calls:
        torch.testing.assert_close(x, torch.sin(small.inputs[0]) + small.inputs[1])
        torch.testing.assert_close(y, small.inputs[0].cos())
    assert len({x.data_ptr() for x, _ in calls}) == len(calls), "a later call must leave results alone"
    library = Library(next(tmp_path.glob("*.so")), 2)
    for _ in range(TIMED_CALLS):
        library.run(list(small.inputs))
    assert "AOTIModelContainerRunner" in repr(library._current)
    assert not library._container.value, "one container is enough"
    torch.testing.assert_close(library._without_gil(list(small.inputs))[1], small.inputs[0].cos())  # was on its way
    with monkeypatch.context() as patched:
        patched.setattr(torch._C._aoti, "AOTIModelContainerRunnerCpu", lambda *arguments: 1 / 0)
        library = Library(next(tmp_path.glob("*.so")), 2)
        for _ in range(TIMED_CALLS + 1):
            torch.testing.assert_close(library.run(list(small.inputs))[1], small.inputs[0].cos())
        assert library._current == library._without_gil
        assert library._container.value
    dynamic = Library(next(tmp_path.glob("*.so")), 2, dynamic=True)
    for _ in range(TIMED_CALLS):
        dynamic.run(list(small.inputs))
    assert dynamic._current == dynamic._without_gil, "other sizes may take long"
    monkeypatch.setattr(handles, "QUICK_S", 0.0)
    library = Library(next(tmp_path.glob("*.so")), 2)
    for _ in range(TIMED_CALLS):
        library.run(list(small.inputs))
    assert library._current == library._without_gil


@pytest.mark.compile
@pytest.mark.parametrize("name", ["inductor", "inductor-cpp-wrapper", "aotinductor"])
def test_what_keeps_no_weights_takes_those_of_each_call(name: str, stored: Callable[..., Any]) -> None:
    """So nobody has to watch them."""
    assert not binds_static(registry.get(name))
    artifact = stored(name)
    own = artifact.program
    run = artifact.load(own)
    assert own.static_inputs
    other = [v + 0.5 if i in own.static_inputs else v for i, v in enumerate(own.inputs)]
    assert_same_as_eager(run, own.with_inputs(other))
