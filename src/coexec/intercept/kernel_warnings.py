"""Warnings of kernels that the GraphRunner ran: issued on Python's thread, at the line of their op."""

from __future__ import annotations

import builtins
import sys
import warnings
from types import CodeType
from typing import Any

_registries: dict[str, dict[Any, Any]] = {}
"""By file name: the namespace of the module that it defines, where `warnings` remembers what it has shown."""


def issue_warning(chain: list[tuple[CodeType, int]], category: str, text: str) -> None:
    """Issues one warning as the innermost frame of `chain` (code object, byte offset) would have.

    Filters by category, text, module and line, "once per line" included, work as in eager; only the time differs: a
    `catch_warnings` block sees what belongs to it if a value is read before the block ends.

    Raises:
        the warning, if a filter says so.
    """
    kind: type[Warning] = getattr(builtins, category)
    if not chain:
        warnings.warn(text, kind, stacklevel=1)
        return
    code, offset = chain[0]
    namespace = _namespace(code.co_filename)
    warnings.warn_explicit(
        text,
        kind,
        code.co_filename,
        line_of(code, offset),
        module=namespace.get("__name__"),
        registry=namespace.setdefault("__warningregistry__", {}),
    )


def _namespace(filename: str) -> dict[Any, Any]:
    """The globals of the module that `filename` defines; a dictionary of its own for code of no module."""
    if filename not in _registries:
        modules = (vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__"))
        found = (names for names in modules if names.get("__file__") == filename)
        _registries[filename] = next(found, {})
    return _registries[filename]


def line_of(code: CodeType, offset: int) -> int:
    """Returns the line of the instruction at a byte offset; the first line of `code` if it has none."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
