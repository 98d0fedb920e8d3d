"""The second key: everything outside the graph on which an artifact or a measurement depends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = "coexec-environment 1"


@dataclass(frozen=True, slots=True)
class Environment:
    """Identity of an environment. Two are equal when their digests are."""

    digest: str  # SHA-256 of `text`, 64 hex digits
    text: str = field(compare=False, repr=False)  # entries "name: value", one a line

    def entries(self) -> dict[str, str]:
        """The named entries, as for reports."""
        pairs = (line.partition(": ") for line in self.text.splitlines()[1:])
        return {name: value for name, _, value in pairs}


def environment_of_entries(entries: Mapping[str, str]) -> Environment:
    """An environment from named entries; values are one line each."""
    lines = [FORMAT, *(f"{name}: {' '.join(value.split())}" for name, value in entries.items())]
    return environment_of_text("\n".join(lines) + "\n")


def environment_of_text(text: str) -> Environment:
    """An environment from its canonical text, as stored."""
    return Environment(hashlib.sha256(text.encode()).hexdigest(), text)
