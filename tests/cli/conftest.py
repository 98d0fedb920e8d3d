"""The command line in this process, on a store and keys of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coexec.cli.app import main
from coexec.subgraphs.store import Store, open_store


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """Stdout as one JSON document."""
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without store and keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("COEXEC_STORE", raising=False)
    return tmp_path


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `coexec` with words, as that user."""

    def run_words(*words: object) -> Answer:
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return run_words


@pytest.fixture
def store(home: Path) -> Store:
    """That user's store."""
    return open_store(strict=True)
