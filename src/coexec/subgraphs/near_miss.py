"""Why a lookup missed by a little: which named entries of two canonical texts differ (keys and environments alike)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from coexec.subgraphs.key import SEPARATOR


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs. `None` on a side: that text has no such entry."""

    entry: str  # "in0", "mode.grad", "%3 aten.convolution.default stride", "torch"
    left: str | None
    right: str | None

    def __str__(self) -> str:
        return f"{self.entry}: {_shown(self.left)} -> {_shown(self.right)}"


def _shown(value: str | None) -> str:
    return "(absent)" if value is None else value if len(value) <= 120 else f"{value[:117]}..."


def explain_difference(left: str, right: str, limit: int = 20) -> tuple[Difference, ...]:
    """The entries in which two canonical texts differ, at most `limit`; () for equal texts.

    Entries of one name are compared argument by argument. If ops were inserted or removed, so that all later numbers
    shift, the op lists are aligned first and only the ops that are in one text alone are named.
    """
    if left == right:
        return ()
    a, b = _entries(left), _entries(right)
    differences = _aligned(a, b) if _ops(a) != _ops(b) else _by_name(a, b)
    return tuple(difference for difference, _ in zip(differences, range(limit), strict=False))


def _entries(text: str) -> dict[str, str]:
    entries = {}
    for number, line in enumerate(text.splitlines()):
        name, found, value = line.partition(": ")
        entries[name if found else f"line {number}"] = value if found else line
    return entries


def _is_node(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith("%")


def _ops(entries: dict[str, str]) -> list[str]:
    return [value.split(SEPARATOR, 1)[0] for name, value in entries.items() if _is_node(name)]


def _by_name(a: dict[str, str], b: dict[str, str]) -> Iterator[Difference]:
    for name in [*a, *(name for name in b if name not in a)]:
        left, right = a.get(name), b.get(name)
        if left == right:
            continue
        if _is_node(name) and left is not None and right is not None:
            yield from _by_argument(name, left, right)
        else:
            yield Difference(name, left, right)


def _by_argument(name: str, left: str, right: str) -> Iterator[Difference]:
    op = left.split(SEPARATOR, 1)[0]
    a, b = _arguments(left), _arguments(right)
    for argument in [*a, *(argument for argument in b if argument not in a)]:
        if a.get(argument) != b.get(argument):
            yield Difference(f"{name} {op} {argument}", a.get(argument), b.get(argument))


def _arguments(value: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in value.split(SEPARATOR)[1:])
    return {name: text for name, _, text in pairs}


def _aligned(a: dict[str, str], b: dict[str, str]) -> Iterator[Difference]:
    """Entries other than nodes by name, then the ops of one text that the other lacks."""
    yield from _by_name(_without_nodes(a), _without_nodes(b))
    left, right = _ops(a), _ops(b)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            where = f"ops {i1}..{i2}" if i1 != i2 else f"before op {i1}"
            yield Difference(where, ", ".join(left[i1:i2]) or None, ", ".join(right[j1:j2]) or None)


def _without_nodes(entries: dict[str, str]) -> dict[str, str]:
    # The output's entry names nodes by number, which have shifted: it would only repeat that.
    return {name: value for name, value in entries.items() if not _is_node(name) and not name.endswith("output")}
