"""Wrappers for `compare.py --wrap coexec_cases:NAME`."""

from __future__ import annotations

from typing import Any

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready

build(verbose=False)  # the cases are about steps, not about the build
assert native_if_ready() is not None


def replay(step: Any) -> Any:
    """Bit-exact: the recorded ops, replayed."""
    return coexec.compile(step, backend="replay", numerics="exact")


def lazy(step: Any) -> Any:
    """The GraphRunner starts only when Python needs a value."""
    return coexec.compile(step, backend="replay", numerics="exact", mode="lazy")


def default(step: Any) -> Any:
    """As a user gets it."""
    return coexec.compile(step)


def overlap(step: Any) -> Any:
    """A call may return before its graph has finished."""
    return coexec.compile(step, backend="replay", numerics="exact", overlap=True)
