"""Errors of the subgraph database. A serving store counts them and goes on; tools and strict stores raise them."""

from __future__ import annotations

from coexec.errors import CoexecError, MachineError


class UnkeyableGraphError(CoexecError, ValueError):
    """The graph holds something without a stable identity, so nothing about it may be stored or looked up."""


class StoreError(MachineError, RuntimeError):
    """The store cannot serve. `reason` is the short name under which it is counted: "locked", "corrupted" ..."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TrustError(CoexecError, RuntimeError):
    """A key, signature, directory or archive that must not be believed. Nothing was loaded."""
