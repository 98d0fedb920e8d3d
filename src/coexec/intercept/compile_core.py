"""Compiles the native core, once per (sources, torch, Python, compiler, flags), and loads it.

The sources are compiled as one translation unit: most of the time goes into torch's headers, and reading them once
takes a third of the processor time of reading them per file. So names in the anonymous namespaces of csrc/*.cpp must
differ between files. A file that defines Py_BUILD_CORE is compiled by itself, since that changes what Python.h means.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from coexec.config import private_cache_dir
from coexec.errors import NativeBuildError
from coexec.intercept import toolchain

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
MODULE_NAME = f"coexec.{toolchain.MODULE}"
FILE_NAME = f"{toolchain.MODULE}.so"
COMPILE_TIMEOUT_S = 900.0
POLL_S = 0.1
LOG_TAIL_LINES = 20


def native_path_if_ready(sources: Path = SOURCES) -> Path | None:
    """Returns the built core for exactly these sources and this Python, torch and compiler, or None.

    On a machine without a compiler a core that any compiler built from these sources is good: that is what a container
    image has whose build stage had one.

    Raises:
        CacheFolderError: the cache folder is not private.
    """
    folder = private_cache_dir("native")
    compiler = toolchain.find_compiler()
    if compiler is not None:
        path = _output_path(folder, sources, compiler)
        return path if path.is_file() else None
    return next(iter(sorted(folder.glob(f"{source_key(sources)}-*/{FILE_NAME}"))), None)


def build(verbose: bool = True, sources: Path = SOURCES, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Builds the core if it is not there yet, and returns its path.

    Two processes may call this at once: one builds, the other waits for it. A builder that is killed leaves nothing
    that a later one would mistake for a result.

    Args:
        verbose: say on stderr what is built and how long it took.
        sources: folder with the *.cpp and *.h files.
        should_stop: asked every 0.1 s; if it says True, the build is given up with a NativeBuildError.

    Raises:
        NativeBuildError: a tool is missing, or the compiler failed; `.missing` and `.log` say which and where.
        CacheFolderError: the cache folder cannot be used.
    """
    compiler = toolchain.require_compiler()
    output = _output_path(private_cache_dir("native"), sources, compiler)
    output.parent.mkdir(mode=0o700, exist_ok=True)
    with _locked(output.parent / "lock", should_stop):
        if not output.is_file():
            started_s = time.monotonic()
            _say(f"building its native core in {output.parent} (once, under a minute on an idle core) ...", verbose)
            _compile_and_publish(compiler, sources, output, should_stop)
            _say(f"native core built in {time.monotonic() - started_s:.0f} s", verbose)
    return output


def load(path: Path) -> ModuleType:
    """Imports the core as `coexec._native`; a second call returns the same module.

    Raises:
        NativeBuildError: the file cannot be loaded. It is removed, so that the next process builds it again.
    """
    if MODULE_NAME in sys.modules:
        return sys.modules[MODULE_NAME]
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    assert spec is not None  # a loader was given
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        path.unlink(missing_ok=True)
        raise NativeBuildError(
            f"coexec built its native core but cannot load it: {error}. The file was removed; the next process builds "
            f"it again. Until then every step runs as plain eager PyTorch."
        ) from error
    sys.modules[MODULE_NAME] = module
    return module


def source_key(sources: Path = SOURCES) -> str:
    """Returns 16 hex digits that name the sources and everything that a built core depends on but the compiler.

    Raises:
        NativeBuildError: the folder holds no C++ file (a broken installation).
    """
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    if not any(file.suffix == ".cpp" for file in files):
        raise NativeBuildError(f"No C++ sources in {sources}: the installation of coexec is incomplete; reinstall it.")
    digest = hashlib.sha256()
    for name, value in sorted(toolchain.abi_entries().items()):
        digest.update(f"{name}={value}\n".encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _output_path(folder: Path, sources: Path, compiler: toolchain.Compiler) -> Path:
    compiler_key = hashlib.sha256(compiler.version.encode()).hexdigest()[:8]
    return folder / f"{source_key(sources)}-{compiler_key}" / FILE_NAME


@contextlib.contextmanager
def _locked(path: Path, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Holds an exclusive lock that the system drops when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _try_lock(descriptor):
            _give_up_if(should_stop)
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile_and_publish(
    compiler: toolchain.Compiler, sources: Path, output: Path, should_stop: Callable[[], bool]
) -> None:
    """Compiles in a scratch folder beside `output` and renames the result into place. Called with the lock held."""
    for stale in output.parent.glob("build-*"):  # a killed builder's: whoever holds the lock is alone here
        shutil.rmtree(stale, ignore_errors=True)
    scratch = output.parent / f"build-{os.getpid()}"
    scratch.mkdir(mode=0o700)
    log = output.parent / "build.log"
    log.write_text(f"{compiler.version}\n")
    try:
        units = _translation_units(sources, scratch)
        objects = [scratch / f"{unit.stem}.o" for unit in units]
        for unit, target in zip(units, objects, strict=True):
            command = [compiler.path, *toolchain.compile_flags(), f"-I{sources}", "-c", str(unit), "-o", str(target)]
            _run(command, log, should_stop)
        linked = scratch / FILE_NAME
        _run([compiler.path, *map(str, objects), *toolchain.link_flags(), "-o", str(linked)], log, should_stop)
        if _output_path(output.parent.parent, sources, compiler) != output:
            raise NativeBuildError(f"The sources in {sources} changed during the build; the next process builds them.")
        with linked.open("rb") as stream:
            os.fsync(stream.fileno())  # a crash of the machine must not leave a published file with holes
        linked.replace(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _translation_units(sources: Path, scratch: Path) -> list[Path]:
    """The files to compile: one that includes all sources, and the sources that must stand alone."""
    files = sorted(sources.glob("*.cpp"))
    alone = [file for file in files if "#define Py_BUILD_CORE" in file.read_text()]
    together = [file for file in files if file not in alone]
    if not together:
        return alone
    unity = scratch / "coexec_unity.cpp"
    unity.write_text("".join(f'#include "{file}"\n' for file in together))
    return [unity, *alone]


def _run(command: list[str], log: Path, should_stop: Callable[[], bool]) -> None:
    """Runs one compiler call, its output into `log`; ends it when asked to stop, on Ctrl-C, or when it hangs."""
    deadline_s = time.monotonic() + COMPILE_TIMEOUT_S
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        # A process group of its own: the compiler driver does not pass a signal on to the compiler proper.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, "LC_ALL": "C"},  # the log is searched for "error: "
        )
    try:
        while process.poll() is None:
            _give_up_if(should_stop)
            if time.monotonic() > deadline_s:
                raise _compile_error(f"the compiler did not end within {COMPILE_TIMEOUT_S:.0f} s", log)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise _compile_error(f"the compiler failed (exit status {process.returncode})", log)


def _give_up_if(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise NativeBuildError("The build of the native core was given up; the next process starts it again.")


def _compile_error(what: str, log: Path) -> NativeBuildError:
    lines = log.read_text(errors="replace").splitlines()
    wanted = [line for line in lines if "error: " in line] or lines
    tail = "\n    ".join(wanted[-LOG_TAIL_LINES:])
    return NativeBuildError(
        f"coexec cannot build its native core: {what}.\n    {tail}\nThe whole output is in {log}. A compiler that "
        f"knows C++20 is needed (g++ 11, clang++ 14 or newer; CXX chooses one). Until then every step runs as plain "
        f"eager PyTorch.",
        log=str(log),
    )


def _say(text: str, verbose: bool) -> None:
    if verbose:
        print(f"coexec: {text}", file=sys.stderr, flush=True)
