"""When the reads of torch are wrapped: as soon as torch is there.

Imports nothing of coexec that imports torch before: it runs at the end of torch's own import, whoever began that.
"""

from __future__ import annotations

import torch

from coexec.config import disabled
from coexec.intercept import reads

SUPPORTED_TORCH = ("2.13",)
"""Releases the interceptor was tested with; the dispatch key it sits on is reserved upstream."""


def supported_torch() -> bool:
    """Whether co-execution works with the installed torch."""
    return ".".join(torch.__version__.split(".")[:2]) in SUPPORTED_TORCH


def install_wrappers() -> None:
    """Wraps the reads that bypass the dispatcher, unless this process will have no native core."""
    if supported_torch() and not disabled():
        reads.install()
