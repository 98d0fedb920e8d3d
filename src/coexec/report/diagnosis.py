"""`coexec doctor` as a library: what coexec needs on this machine, what is there, and what to do about the rest."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coexec.advice import how_to_install

Status = Literal["ok", "info", "warning", "problem"]

PYTHON_OLDEST, PYTHON_NEWEST = (3, 11), (3, 13)
"""Whose frames the native core knows (csrc/location.cpp)."""

TORCH = "torch>=2.13,<2.14"
"""As in pyproject.toml."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    part: str  # "torch", "compiler" ...
    status: Status  # "problem": part of coexec cannot work; "warning": it works, slower or with a risk
    found: str  # what is there
    advice: str = ""  # the next thing to try; empty if nothing is to be done


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether one candidate backend can be tuned with here."""

    name: str
    usable: bool
    version: str
    reason: str  # why not; empty if usable
    works_with: str  # the versions that would work; empty if usable or if none would


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was looked at. A backend that is missing is no problem: the others are tuned without it."""

    checks: tuple[Check, ...]
    backends: tuple[BackendState, ...]

    @property
    def ok(self) -> bool:
        """No check is a problem."""
        return all(check.status != "problem" for check in self.checks)


def diagnose() -> Diagnosis:
    """Looks at everything; never raises: a check that fails is a problem of its own."""
    looks: dict[str, Callable[[], Iterator[Check]]] = {
        "python": _python,
        "torch": _torch,
        "compiler": _compiler,
        "Python.h": _headers,
        "ninja": _ninja,
        "cpu": _cpu,
        "threads": _threads,
        "entry point": _entry_point,
        "cache": _cache,
        "store": _store,
        "keys": _keys,
    }
    checks = [check for part, look in looks.items() for check in _looked_at(part, look)]
    try:
        backends = tuple(backend_states())
    except Exception as error:
        backends = ()
        checks.append(_failed("backends", error))
    return Diagnosis(tuple(checks), backends)


def backend_states() -> Iterator[BackendState]:
    """Every registered candidate backend, usable or not, by name."""
    from coexec.backends.candidates.registry import candidates

    for name, candidate in sorted(candidates().items()):
        try:
            found = candidate.availability()
        except Exception as error:  # another package's detection: its failure concerns that backend only
            yield BackendState(name, False, "", f"its detection failed ({type(error).__name__}: {error})", "")
        else:
            yield BackendState(name, found.usable, found.version, found.reason, found.works_with)


def _looked_at(part: str, look: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(look())
    except Exception as error:  # a broken installation is what a diagnosis is for
        return [_failed(part, error)]


def _failed(part: str, error: Exception) -> Check:
    return Check(part, "problem", f"cannot be looked at: {type(error).__name__}: {error}")


# Python and torch ----------------------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    yield _python_release(sys.version_info[:3])


def _python_release(version: tuple[int, int, int]) -> Check:
    found = f"{'.'.join(map(str, version))}, {sys.executable}"
    if PYTHON_OLDEST <= version[:2] <= PYTHON_NEWEST:
        return Check("python", "ok", found)
    oldest, newest = (".".join(map(str, release)) for release in (PYTHON_OLDEST, PYTHON_NEWEST))
    return Check("python", "problem", found, f"use Python {oldest} to {newest}")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "problem", f"cannot be imported: {error}", f"pip install '{TORCH}'")
        return
    yield _release(torch.__version__)


def _release(version: str) -> Check:
    from coexec.intercept.wrappers import SUPPORTED_TORCH

    if ".".join(version.split(".")[:2]) in SUPPORTED_TORCH:
        return Check("torch", "ok", version)
    advice = f"for coexec.compile and coexec.step install torch {' or '.join(SUPPORTED_TORCH)}"
    return Check("torch", "warning", f"{version}: the database, the tuner and torch.compile's backend only", advice)


# The toolchain -------------------------------------------------------------------------------------------------------


def _compiler() -> Iterator[Check]:
    from coexec.intercept.toolchain import find_compiler

    found = find_compiler()
    if found is None:
        advice = "install g++ (Debian, Ubuntu: apt-get install g++), or set CXX; until then steps run as plain eager"
        yield Check("compiler", "problem", "no C++ compiler that runs", advice)
    else:
        yield Check("compiler", "ok", f"{found.version}, {found.path}")


def _headers() -> Iterator[Check]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        yield Check("Python.h", "ok", str(header))
    else:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield Check(
            "Python.h", "problem", f"{header} is missing", f"install Python's headers (Debian, Ubuntu: {package})"
        )


def _ninja() -> Iterator[Check]:
    """coexec's own build and Inductor do without; torch.utils.cpp_extension, which custom ops use, does not."""
    path = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if path is None:
        yield Check("ninja", "info", "not found", "only needed by extensions of your own: pip install ninja")
    else:
        yield Check("ninja", "ok", path)


# The processor -------------------------------------------------------------------------------------------------------


def _cpu() -> Iterator[Check]:
    import torch

    from coexec.subgraphs.cpu import cpu_features

    capability, features = torch.backends.cpu.get_cpu_capability(), cpu_features()
    wide = [name for name in features if name.startswith(("avx", "amx", "sve", "asimd", "neon"))]
    yield Check("cpu", "ok", f"{capability}; {' '.join(wide) or 'no vector extensions known'}")


def _threads() -> Iterator[Check]:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    found = f"{threads} intra-op threads, {cores} cores for this process, load {os.getloadavg()[0]:.1f}"
    if threads > cores:
        yield Check("threads", "warning", found, f"more threads than cores: set OMP_NUM_THREADS={cores}")
    else:
        yield Check("threads", "ok", found)


def _entry_point() -> Iterator[Check]:
    """What makes `torch.compile(backend="coexec")` work in a program that does not import coexec."""
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "coexec"]
    if found:
        yield Check("entry point", "ok", f'torch.compile(backend="coexec") is {found[0].value}')
        return
    advice = f"{how_to_install()}; until then `import coexec` before torch.compile registers it"
    yield Check("entry point", "warning", "coexec is not installed as a package: no entry point for Dynamo", advice)


# The database --------------------------------------------------------------------------------------------------------


def _cache() -> Iterator[Check]:
    from coexec import config

    folder = config.cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield Check("cache", "problem", f"{existing} is no folder", "set COEXEC_CACHE_DIR to a private folder")
        return
    if existing == folder and folder.stat().st_mode & 0o022:
        found = f"{folder} can be written by others, so nothing in it is used"
        yield Check("cache", "problem", found, f"chmod go-w {folder}, or set COEXEC_CACHE_DIR to a private folder")
        return
    if not os.access(existing, os.W_OK):
        yield Check("cache", "warning", f"{folder} cannot be written", "set COEXEC_CACHE_DIR to a writable folder")
        return
    free_bytes = shutil.disk_usage(existing).free
    status: Status = "ok" if free_bytes > 1 << 30 else "warning"
    advice = "" if status == "ok" else "free some space, or `coexec db prune --max-bytes N`"
    yield Check("cache", status, f"{folder}, {free_bytes / 2**30:.1f} GiB free", advice)


def _store() -> Iterator[Check]:
    from coexec.subgraphs.errors import StoreError, TrustError
    from coexec.subgraphs.store import open_store

    store = open_store(strict=True)
    try:
        location = store.location
        if location.sqlite_file is not None and not location.sqlite_file.exists():
            yield Check("store", "info", f"{location.sqlite_file} does not exist yet; it is made on first use")
            return
        stats = store.stats()
    except (StoreError, TrustError) as error:
        yield Check("store", "problem", str(error), "steps and torch.compile work without it, only slower")
        return
    assert stats is not None, "a strict store raises instead"
    kind = "shared, signatures are checked" if location.shared else "private to this user"
    found = f"{stats.url} ({kind}): {stats.subgraphs} subgraphs, {stats.decided} with a decision, schema {stats.schema}"
    yield Check("store", "ok", found)


def _keys() -> Iterator[Check]:
    from coexec.subgraphs.errors import TrustError
    from coexec.subgraphs.location import current_location
    from coexec.subgraphs.trust import Keyring

    keyring = Keyring()
    try:
        trusted = len(keyring.trusted())
    except TrustError as error:
        yield Check("keys", "problem", str(error), "until then nothing of a shared store or an import is believed")
        return
    found = f"{keyring.folder}, {trusted} trusted"
    if trusted == 0 and current_location().shared:
        yield Check("keys", "warning", found, "COEXEC_STORE is shared: `coexec db key --create`, then --trust others'")
    else:
        yield Check("keys", "ok" if trusted else "info", found)
