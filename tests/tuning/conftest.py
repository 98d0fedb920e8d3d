"""The planted candidates, found by this process and by the tuner's children."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coexec.backends.candidates import registry
from coexec.tuning import identity
from tests.tuning import planted


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    planted.install(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def planted_candidates(planted_folder: Path) -> Iterator[None]:
    """On the path, so that children find it too; the registry looks again, before and after."""
    sys.path.insert(0, str(planted_folder))
    _look_again()
    yield
    sys.path.remove(str(planted_folder))
    _look_again()


def _look_again() -> None:
    registry.candidates.cache_clear()
    identity._backend_versions.cache_clear()
