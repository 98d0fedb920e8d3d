"""The key of an artifact: SHA-256 of the segment's canonical text and of everything else that its code depends on."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch

from coexec.backends.spec import SegmentSpec
from coexec.backends.spec_json import canonical_text
from coexec.backends.symbolic import SymbolicSpec
from coexec.intercept import toolchain

LOWERING_FILES = (
    "aliasing.py", "divisions.py", "draws.py", "expressions.py", "fed.py", "guards.py", "index_errors.py",
    "inductor.py", "layout.py", "lower.py", "ops.py", "publish.py", "results.py", "spec_json.py", "symbolic.py",
    "trim.py", "value_checks.py",
)  # fmt: skip
"""Our code that decides what an artifact computes and how: a change of one of them makes new keys."""


BEGINNING = "coexec-segment 1\n"


def key_text(spec: SegmentSpec | SymbolicSpec) -> str:
    """The text that is hashed: kept beside the hash, so that a miss can be explained."""
    return f"{_beginning_here()}{spec.text() if isinstance(spec, SymbolicSpec) else canonical_text(spec)}"


def artifact_key(spec: SegmentSpec | SymbolicSpec) -> str:
    """64 hex digits. Two segments with one key may share an artifact on this machine."""
    return hash_text(key_text(spec))


def hash_text(text: str) -> str:
    """The key of a segment whose :func:`key_text` is `text`."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_segment(text: str) -> bool:
    """Whether a key's text is that of a segment."""
    return text.startswith(BEGINNING)


def is_of_here(text: str) -> bool:
    """Whether a segment's text names the environment of this process: only here can its library be made."""
    return text.startswith(_beginning_here())


def _beginning_here() -> str:
    return BEGINNING + "".join(f"{name}: {value}\n" for name, value in environment().items())


@functools.cache
def environment() -> dict[str, str]:
    """Named entries of this process: versions, processor, compiler. The thread count is part of the segment."""
    compiler = toolchain.find_compiler()
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}",
        "compiler": compiler.version if compiler else "none",
        "lowering": lowering_version(),
    }


@functools.cache
def lowering_version() -> str:
    """Version of coexec's lowering: digest of the files that it consists of."""
    digest = hashlib.sha256()
    for name in LOWERING_FILES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    """Digest of the processor's feature flags: code for AVX-512 ends the process on a machine without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
