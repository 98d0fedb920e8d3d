"""The C++ toolchain of the native core: which compiler, which flags, and what is missing on this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from coexec.config import settings
from coexec.errors import NativeBuildError

MODULE = "_native"
"""Last part of the module's name; `PYBIND11_MODULE(TORCH_EXTENSION_NAME, ...)` makes `PyInit__native` of it."""

COMPILERS = ("g++", "c++", "clang++")
# -O2: the per-op path is what the product is measured by; -O3 and -march=native gained nothing there, and the latter
# would tie the file to one CPU. No -fopenmp: torch brings its own OpenMP runtime, a second one in the process would
# oversubscribe the cores.
OPTIMIZE_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden")
# Without vptr: it compares type infos of torch's classes that a hidden-visibility library has copies of.
SANITIZE_FLAGS = ("-g1", "-fno-omit-frame-pointer", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler of this machine."""

    path: str
    version: str  # first line of --version


def find_compiler() -> Compiler | None:
    """Returns the compiler of CXX, else the first of COMPILERS, or None if there is none that runs."""
    chosen = settings().cxx
    for name in [chosen] if chosen else COMPILERS:
        path = shutil.which(name)
        if path and (version := _version_line(path)):
            return Compiler(path, version)
    return None


def require_compiler() -> Compiler:
    """Returns the compiler.

    Raises:
        NativeBuildError: the compiler or Python's headers are missing; the message names what to install.
    """
    compiler = find_compiler()
    if compiler is None:
        chosen = settings().cxx
        if chosen and shutil.which(chosen):
            raise _missing("a C++ compiler", f"`{chosen} --version`, which CXX names, fails.")
        raise _missing(chosen or "g++", "Install it (Debian, Ubuntu: apt-get install g++), or set CXX.")
    header = python_include_dir() / "Python.h"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise _missing("Python.h", f"Looked for {header}. Install Python's headers (Debian, Ubuntu: {package}).")
    return compiler


def python_include_dir() -> Path:
    """Returns the folder that Python.h should be in."""
    return Path(sysconfig.get_path("include"))


def compile_flags() -> list[str]:
    """Returns the flags of every source file, paths included."""
    torch_include = Path(torch.__file__).parent / "include"
    includes = [torch_include, torch_include / "torch" / "csrc" / "api" / "include", python_include_dir()]
    defines = [
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    return [
        *OPTIMIZE_FLAGS,
        *sanitize_flags(),
        *defines,
        *(word for path in includes for word in ("-isystem", str(path))),
    ]


def sanitize_flags() -> list[str]:
    """Returns the flags of COEXEC_SANITIZE, for the compiler and for the linker; usually none."""
    chosen = settings().sanitize
    return [f"-fsanitize={chosen}", *SANITIZE_FLAGS] if chosen else []


def link_flags() -> list[str]:
    """Returns the flags of the link; the libraries are those that `import torch` has loaded already."""
    folder = Path(torch.__file__).parent / "lib"
    return ["-shared", *sanitize_flags(), f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def abi_entries() -> dict[str, str]:
    """Returns what a built core depends on besides its sources and its compiler, one named entry each."""
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}",
        "machine": f"{sys.platform} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "flags": " ".join([*OPTIMIZE_FLAGS, *sanitize_flags(), "-shared"]),
    }


def _version_line(path: str) -> str:
    """The compiler's first line of --version, or "" if it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def _missing(tool: str, advice: str) -> NativeBuildError:
    return NativeBuildError(
        f"coexec cannot build its native core: {tool} is missing. {advice} "
        f"Until then every step runs as plain eager PyTorch; COEXEC_DISABLE=1 says so on purpose.",
        missing=tool,
    )
