"""Which torch is installed, and the one place that knows what differs between the releases that are supported."""

from __future__ import annotations

import functools
import importlib.metadata

OLDEST = (2, 8)
"""The database side runs on every torch from here on; the native core of co-execution has its own check."""


@functools.cache
def torch_version() -> str:
    """The installed release, without importing torch: "2.13.0+cpu", or "" if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_release() -> tuple[int, int]:
    """(major, minor) of the installed torch, (0, 0) if there is none."""
    parts = torch_version().split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 else (0, 0)
