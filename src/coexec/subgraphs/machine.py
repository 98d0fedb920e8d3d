"""The environment of this process: versions, CPU, thread count, switches, and the code of custom ops."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Mapping

import torch

from coexec.subgraphs.code_hash import op_code_hash
from coexec.subgraphs.cpu import cpu_features
from coexec.subgraphs.environment import Environment, environment_of_entries

BACKEND_DISTRIBUTIONS = (
    "apache-tvm",
    "apache-tvm-ffi",
    "intel-extension-for-pytorch",
    "iree-base-compiler",
    "iree-base-runtime",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "zentorch",
)
"""Distributions whose versions count. They are looked up, never imported: importing some changes torch itself."""


def current_environment(
    *,
    threads: int | None = None,
    lowering: str = "",
    custom_ops: Iterable[str] = (),
    backends: Mapping[str, str] | None = None,
) -> Environment:
    """The environment of this process.

    `threads`: intra-op thread count that will serve (default: torch's now). `lowering`: version of coexec's lowering
    to the backends. `custom_ops`: the key's, "namespace::name"; their code is hashed. `backends`: versions by
    distribution in place of the installed ones, for backends that others register.
    Errors: UnkeyableGraphError for a custom op whose code cannot be found.
    """
    versions = installed_backends() if backends is None else backends
    entries = {
        **_platform_entries(),
        **_switch_entries(),
        "threads": str(torch.get_num_threads() if threads is None else threads),
        "lowering": lowering or "none",
        **{f"backend.{name}": version for name, version in sorted(versions.items())},
        **{f"op.{op}": op_code_hash(op) for op in sorted(set(custom_ops))},
    }
    return environment_of_entries(entries)


@functools.cache
def _platform_entries() -> dict[str, str]:
    """What cannot change while the process lives."""
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu.capability": torch.backends.cpu.get_cpu_capability(),
        "cpu.features": " ".join(cpu_features()),
    }


def _switch_entries() -> dict[str, str]:
    """Process-wide switches that change what the same kernels compute."""
    return {
        "switch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "switch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "switch.mkldnn": str(torch.backends.mkldnn.enabled),
    }


@functools.cache
def installed_backends() -> dict[str, str]:
    """Versions of the known backend distributions that are installed, without importing any."""
    return {name: version for name in BACKEND_DISTRIBUTIONS if (version := _version(name)) is not None}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
