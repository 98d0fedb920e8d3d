"""Stored artifacts that several tests share: each is built once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import Runner
from coexec.backends.candidates.program import Program
from tests.candidates.samples import program

THREADS = 1  # not the machine's count: what the code was built for is then visible in it


@dataclass(frozen=True)
class Stored:
    name: str
    program: Program
    folder: Path
    metadata: Any

    def load(self, program: Program | None = None) -> Runner:
        return registry.get(self.name).load(self.folder, self.metadata, program or self.program, threads=THREADS)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Stored]:
    """(candidate, kind of program) -> its artifact, as read-only files. Skips what cannot be used here."""
    built: dict[tuple[str, str], Stored] = {}

    def get(name: str, kind: str = "everything") -> Stored:
        available = registry.get(name).availability()
        if not available.usable:
            pytest.skip(available.reason)
        if (name, kind) not in built:
            folder = tmp_path_factory.mktemp(f"{name}-{kind}")
            metadata = registry.get(name).build(program(kind), folder, threads=THREADS, budget_s=5)
            for file in folder.iterdir():
                file.chmod(0o400)
            built[name, kind] = Stored(name, program(kind), folder, metadata)
        return built[name, kind]

    return get
