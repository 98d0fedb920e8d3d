"""`coexec doctor` names what is missing and what to do about it."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import Availability
from coexec.cli.app import PROBLEM
from coexec.report import diagnosis
from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Planted:
    """A candidate whose detection says what the test wants."""

    bakes_constants = False

    def __init__(self, name: str, found: Availability | Exception) -> None:
        self.name, self.found = name, found

    def availability(self) -> Availability:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def check_of(document: Mapping[str, Any], part: str) -> dict[str, Any]:
    return next(check for check in document["checks"] if check["part"] == part)


def test_a_cache_folder_that_others_may_write_to_is_a_problem(run: Run, home: Path) -> None:
    from coexec.config import cache_dir

    cache_dir().mkdir(parents=True, exist_ok=True)
    cache_dir().chmod(0o777)
    answer = run("doctor", "--json")
    assert answer.status == PROBLEM
    assert "chmod go-w" in check_of(answer.json(), "cache")["advice"]


def test_a_file_in_the_place_of_the_cache_folder_is_a_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "file"))
    check = check_of(run("doctor", "--json").json(), "cache")
    assert (check["status"], "is no folder" in check["found"]) == ("problem", True)


def test_the_entry_point_is_looked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    point = importlib.metadata.EntryPoint("coexec", "coexec.dynamo_backend:coexec_backend", "torch_dynamo_backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point,))
    assert check_of(run("doctor", "--json").json(), "entry point")["status"] == "ok"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    missing = check_of(run("doctor", "--json").json(), "entry point")
    assert missing["status"] == "warning"
    assert "import coexec" in missing["advice"]
    assert "in a checkout of coexec: pip install .;" in missing["advice"]


def test_this_machine_is_well(run: Run) -> None:
    answer = run("doctor", "--json")
    assert answer.status == 0
    document = answer.json()
    assert document["ok"]
    parts = [
        "python",
        "torch",
        "compiler",
        "Python.h",
        "ninja",
        "cpu",
        "threads",
        "entry point",
        "cache",
        "store",
        "keys",
    ]
    assert [check["part"] for check in document["checks"]] == parts
    eager = next(state for state in document["backends"] if state["name"] == "eager")
    assert eager["usable"]
    assert eager["reason"] == ""


def test_it_makes_nothing(run: Run, home: Path) -> None:
    assert "does not exist yet" in check_of(run("doctor", "--json").json(), "store")["found"]
    assert list(home.iterdir()) == []


def test_a_missing_compiler_is_a_problem_with_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    answer = run("doctor", "--json")
    assert answer.status == PROBLEM
    assert "apt-get install g++" in check_of(answer.json(), "compiler")["advice"]


def test_a_store_that_others_can_write_is_a_problem(run: Run, home: Path) -> None:
    folder = home / "cache" / "subgraphs"
    folder.mkdir(parents=True)
    (folder / "store.sqlite").touch()
    folder.chmod(0o777)
    check = check_of(run("doctor", "--json").json(), "store")
    assert check["status"] == "problem"
    assert "writable by others" in check["found"]


def test_a_shared_store_without_keys_is_a_warning(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_STORE", f"sqlite:///{home}/team.sqlite")
    document = run("doctor", "--json").json()
    assert check_of(document, "keys")["status"] == "warning"
    assert "coexec db key --create" in check_of(document, "keys")["advice"]


def test_another_torch_leaves_the_database_side(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.8.0+cpu")
    answer = run("doctor", "--json")
    assert answer.status == 0
    check = check_of(answer.json(), "torch")
    assert check["status"] == "warning"
    assert "2.13" in check["advice"]


def test_without_torch_it_still_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = run("doctor", "--json")
    assert answer.status == PROBLEM
    assert check_of(answer.json(), "torch")["advice"] == "pip install 'torch>=2.13,<2.14'"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ((3, 10, 14), "problem"),
        ((3, 11, 0), "ok"),
        ((3, 13, 9), "ok"),
        ((3, 14, 0), "problem"),
        ((4, 0, 0), "problem"),
    ],
)
def test_a_python_whose_frames_are_not_known_is_a_problem(version: tuple[int, int, int], status: str) -> None:
    check = diagnosis._python_release(version)
    assert check.status == status
    assert check.advice == ("" if status == "ok" else "use Python 3.11 to 3.13")


def test_the_versions_that_are_advised_are_those_of_the_package_and_of_the_core() -> None:
    oldest, (major, minor) = diagnosis.PYTHON_OLDEST, diagnosis.PYTHON_NEWEST
    assert PROJECT["requires-python"] == f">={oldest[0]}.{oldest[1]},<{major}.{minor + 1}"
    assert diagnosis.TORCH in PROJECT["dependencies"]
    core = (ROOT / "src" / "coexec" / "csrc" / "location.cpp").read_text()
    guard = re.search(r"PY_VERSION_HEX < 0x(\w+) \|\| PY_VERSION_HEX >= 0x(\w+)", core)
    assert guard is not None
    assert guard.groups() == (f"{oldest[0]:02X}{oldest[1]:02X}0000", f"{major:02X}{minor + 1:02X}0000")


def test_backends_say_why_not_and_what_would_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {
        "old": Planted("old", Availability(False, "needs an older torch", works_with="torch 2.8")),
        "broken": Planted("broken", ImportError("no such symbol")),
    }
    monkeypatch.setattr(registry, "candidates", lambda: planted)
    answer = run("doctor", "--json")
    assert answer.status == 0, "a backend that is missing is no problem"
    old = next(state for state in answer.json()["backends"] if state["name"] == "old")
    assert (old["reason"], old["works_with"]) == ("needs an older torch", "torch 2.8")
    table = run("doctor").out
    assert "needs an older torch" in table
    assert "no such symbol" in table


def test_a_check_that_fails_is_a_problem_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(diagnosis, "_cpu", fail)
    found = diagnosis.diagnose()
    assert not found.ok
    assert [check.found for check in found.checks if check.part == "cpu"] == [
        "cannot be looked at: RuntimeError: out of luck"
    ]


def test_long_reasons_are_folded_and_nothing_of_them_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = " ".join(f"word{number}" for number in range(60))
    found = Availability(False, version="9.9", reason=reason, works_with="coexec-planted 1.0")
    monkeypatch.setattr(registry, "candidates", lambda: {"planted": Planted("planted", found)})
    lines = run("doctor").out.splitlines()
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert f"{reason}; works with coexec-planted 1.0" in told
