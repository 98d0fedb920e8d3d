"""The native build, with a small module in place of the real sources and a compiler that can be slow or counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coexec import errors
from coexec.intercept import build as native
from coexec.intercept import compile_core, toolchain
from coexec.intercept.compile_core import MODULE_NAME

pytestmark = pytest.mark.compile

MODULE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER + offset()); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "", -1, methods};
PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
"""
COUNTING_COMPILER = """#!/bin/sh
case "$1" in --version) exec g++ --version;; esac
echo call >> {calls}
sleep {delay_s}
exec g++ "$@"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("#pragma once\n#define ANSWER 40\nint offset();\n")
    (folder / "module.cpp").write_text(MODULE)
    (folder / "offset.cpp").write_text('#define Py_BUILD_CORE\n#include "answer.h"\nint offset() { return 2; }\n')
    return folder


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Path]]:
    """Returns a function that sets CXX to a compiler with a delay, and returns the file that counts its calls."""
    calls = tmp_path / "calls"

    def install(delay_s: float) -> Path:
        script = tmp_path / "slow-g++"
        script.write_text(COUNTING_COMPILER.format(calls=calls, delay_s=delay_s))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return calls

    yield install
    for handle in native._started.values():
        handle.close()
    native._started.clear()


def run_builder(sources: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "coexec.intercept", "--sources", str(sources), "--parent", str(os.getpid())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_built_core_is_found_again_and_computes(sources: Path) -> None:
    assert native.native_path_if_ready(sources) is None
    path = native.build(verbose=False, sources=sources)
    assert native.native_path_if_ready(sources) == path
    code = (
        "import sys, pathlib; from coexec.intercept import build; m = build.load(pathlib.Path(sys.argv[1]));"
        "print(m.answer(), m.__name__, build.load(pathlib.Path(sys.argv[1])) is m)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["42", "coexec._native", "True"]


def test_key_follows_every_source_and_header(sources: Path) -> None:
    keys = {native.source_key(sources)}
    (sources / "answer.h").write_text("#pragma once\n#define ANSWER 41\nint offset();\n")
    keys.add(native.source_key(sources))
    (sources / "more.cpp").write_text("int more() { return 1; }\n")
    keys.add(native.source_key(sources))
    assert len(keys) == 3


def test_key_follows_torch_and_python(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.source_key(sources)
    entries = toolchain.abi_entries()
    for name in entries:
        monkeypatch.setattr(toolchain, "abi_entries", lambda name=name: entries | {name: "other"})
        assert native.source_key(sources) != before, name


def test_a_core_with_sanitizers_is_another_core(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = native.source_key(sources)
    assert not any("sanitize" in flag for flag in (*toolchain.compile_flags(), *toolchain.link_flags()))
    monkeypatch.setenv("COEXEC_SANITIZE", "undefined")
    assert native.source_key(sources) != plain
    assert "-fsanitize=undefined" in toolchain.compile_flags()
    assert "-fsanitize=undefined" in toolchain.link_flags()


def test_another_compiler_builds_another_file(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.build(verbose=False, sources=sources)
    compiler = toolchain.require_compiler()
    other = toolchain.Compiler(compiler.path, compiler.version + " patched")
    monkeypatch.setattr(toolchain, "find_compiler", lambda: other)
    assert native.native_path_if_ready(sources) is None
    # Without any compiler what is there is used.
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    assert native.native_path_if_ready(sources) == path


def test_two_builders_at_once_compile_once(sources: Path, slow_compiler: Callable[[float], Path]) -> None:
    calls = slow_compiler(0.5)
    builders = [run_builder(sources) for _ in range(2)]
    results = [json.loads(builder.communicate(timeout=60)[0]) for builder in builders]
    assert results[0] == results[1]
    assert Path(results[0]["path"]).is_file()
    assert len(calls.read_text().splitlines()) == 3  # the unity file, the file that stands alone, the link


def test_killed_builder_leaves_nothing_that_looks_built(
    sources: Path, cache: Path, slow_compiler: Callable[[float], Path]
) -> None:
    calls = slow_compiler(60)
    builder = run_builder(sources)
    wait_until(calls.exists)
    builder.kill()
    builder.communicate()
    assert list(cache.rglob("build-*"))  # the killed one could not clean up
    assert native.native_path_if_ready(sources) is None
    slow_compiler(0)
    path = native.build(verbose=False, sources=sources)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["_native.so", "build.log", "lock"]


def test_builder_and_its_compiler_end_with_the_parent(
    sources: Path, tmp_path: Path, slow_compiler: Callable[[float], Path]
) -> None:
    calls = slow_compiler(61.7)
    code = (
        "import sys, time, pathlib; from coexec.intercept import build;"
        "h = build.start_background_build(pathlib.Path(sys.argv[1])); print(h._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(sources)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    wait_until(calls.exists)
    sleeping = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if command_of(pid) == "sleep 61.7"]
    assert len(sleeping) == 1
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not is_running(child_pid) and not is_running(sleeping[0]))


def test_a_stopped_builder_ends_with_a_killed_parent(
    sources: Path, tmp_path: Path, slow_compiler: Callable[[float], Path]
) -> None:
    """It is stopped most of the time while a step runs (background.py)."""
    calls = slow_compiler(61.8)
    code = (
        "import os, signal, sys, time, pathlib; from coexec.intercept import build;"
        "h = build.start_background_build(pathlib.Path(sys.argv[1])); print(h._process.pid, flush=True);"
        "sys.stdin.readline(); os.killpg(h._process.pid, signal.SIGSTOP); print('stopped', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(sources)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child_pid = int(parent.stdout.readline())
    wait_until(calls.exists)
    (sleeping,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if command_of(pid) == "sleep 61.8"]
    parent.stdin.write("now\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "stopped\n"
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not is_running(child_pid) and not is_running(sleeping))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def test_background_build_becomes_ready_at_a_low_priority(
    sources: Path, slow_compiler: Callable[[float], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    calls = slow_compiler(0.3)
    handle = native.start_background_build(sources)
    assert handle.poll() is native.BuildState.RUNNING
    assert native.start_background_build(sources) is handle
    assert handle._process is not None
    assert os.sched_getscheduler(handle._process.pid) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, handle._process.pid) == 19
    assert os.getpgid(handle._process.pid) != os.getpgid(0)  # Ctrl-C at the terminal does not reach it
    assert os.getsid(handle._process.pid) == os.getsid(0)
    assert handle.wait(60) is native.BuildState.READY
    assert handle.path == native.native_path_if_ready(sources)
    assert len(calls.read_text().splitlines()) == 3
    assert capfd.readouterr().err.count("building its native core in the background") == 1


def test_background_build_has_nothing_to_do_when_built(
    sources: Path, capfd: pytest.CaptureFixture[str], slow_compiler: Callable[[float], Path]
) -> None:
    slow_compiler(0)
    path = native.build(verbose=False, sources=sources)
    handle = native.start_background_build(sources)
    assert (handle.poll(), handle.path) == (native.BuildState.READY, path)
    assert capfd.readouterr().err == ""


def test_forked_child_sees_its_parents_build_and_does_not_end_it(
    sources: Path, slow_compiler: Callable[[float], Path]
) -> None:
    calls = slow_compiler(0.5)
    handle = native.start_background_build(sources)
    wait_until(calls.exists)
    pid = os.fork()
    if pid == 0:
        handle.close()
        os._exit(0 if handle.wait(30) is native.BuildState.READY else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert handle.wait(30) is native.BuildState.READY


def test_killed_background_build_says_so(sources: Path, slow_compiler: Callable[[float], Path]) -> None:
    calls = slow_compiler(60)
    handle = native.start_background_build(sources)
    wait_until(calls.exists)
    assert handle._process is not None
    handle._process.kill()
    assert handle.wait(10) is native.BuildState.FAILED
    assert "the next process starts it again" in str(handle.error)


def test_missing_compiler_is_named_before_anything_starts(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.NativeBuildError, match=r"g\+\+ is missing.*apt-get install g\+\+.*eager") as caught:
        native.build(verbose=False, sources=sources)
    assert caught.value.missing == "g++"
    handle = native.start_background_build(sources)
    native._started.clear()
    assert handle.poll() is native.BuildState.FAILED
    assert isinstance(handle.error, errors.NativeBuildError)
    assert handle.error.missing == "g++"


def test_missing_python_header_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "python_include_dir", lambda: tmp_path / "include")
    with pytest.raises(
        errors.NativeBuildError, match=r"Python\.h is missing\. Looked for .*python3\.\d+-dev"
    ) as caught:
        native.build(verbose=False, sources=sources)
    assert caught.value.missing == "Python.h"


def test_a_program_that_is_no_compiler_is_not_called_missing(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(errors.NativeBuildError, match="`/bin/false --version`, which CXX names, fails"):
        native.build(verbose=False, sources=sources)


def test_compile_error_shows_the_compiler_line_and_the_log(sources: Path) -> None:
    (sources / "module.cpp").write_text("int broken() { return nothing; }\n")
    with pytest.raises(errors.NativeBuildError, match=r"'nothing' was not declared") as caught:
        native.build(verbose=False, sources=sources)
    assert Path(caught.value.log).is_file()
    assert native.native_path_if_ready(sources) is None


def test_core_that_cannot_be_loaded_is_removed(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE_NAME, raising=False)  # another test may have loaded the real one
    path = native.build(verbose=False, sources=sources)
    path.write_bytes(b"not a shared object")
    with pytest.raises(errors.NativeBuildError, match="cannot load it"):
        native.load(path)
    assert native.native_path_if_ready(sources) is None


def test_builder_gives_up_when_asked(sources: Path, slow_compiler: Callable[[float], Path]) -> None:
    calls = slow_compiler(60)
    with pytest.raises(errors.NativeBuildError, match="given up"):
        native.build(verbose=False, sources=sources, should_stop=calls.exists)


def test_sources_edited_during_the_build_are_not_published(
    sources: Path, slow_compiler: Callable[[float], Path]
) -> None:
    calls = slow_compiler(0.3)

    def edit_once() -> bool:
        if calls.exists():
            (sources / "late.h").touch()
        return False

    with pytest.raises(errors.NativeBuildError, match="changed during the build"):
        native.build(verbose=False, sources=sources, should_stop=edit_once)


def test_folder_without_sources_is_a_broken_installation(tmp_path: Path) -> None:
    with pytest.raises(errors.NativeBuildError, match="installation of coexec is incomplete"):
        compile_core.source_key(tmp_path)
