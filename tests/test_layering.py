"""The map stays true: a stage imports only earlier stages, and the paper's algorithms import no torch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "coexec"
SHARED = {"records", "config", "errors", "advice", "_native"}
STAGES = ["intercept", "trace", "graph", "plan", "backends", "runtime"]
DATABASE = ["subgraphs", "tuning", "choose", "serving", "dynamo_backend"]
ALLOWED = {stage: SHARED | set(STAGES[: STAGES.index(stage) + 1]) for stage in STAGES}
ALLOWED["runtime"] |= {"choose"}
# The database side knows graphs and backends, never who runs them.
ALLOWED |= {part: SHARED | set(STAGES[:-1]) | set(DATABASE[: DATABASE.index(part) + 1]) for part in DATABASE}
# What people see is thin over the database side, and over the toolchain that `coexec doctor` looks at.
ALLOWED["report"] = SHARED | {"intercept", "backends"} | set(DATABASE)
ALLOWED["cli"] = ALLOWED["report"] | {"report", "__version__"}
ALLOWED |= {name: set() for name in ("records", "errors", "advice")} | {"config": {"errors"}}
IMPORTED_AS = {"apache-tvm": "tvm", "intel-extension-for-pytorch": "intel_extension_for_pytorch"}
NO_TORCH = ["records.py", "trace", "graph", "plan/cases.py"]


def python_files(place: str) -> list[Path]:
    path = SOURCE / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported_modules(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_part_imports_only_earlier_parts(part: str) -> None:
    files = python_files(part if (SOURCE / part).is_dir() else f"{part}.py")
    assert files, part
    for file in files:
        parts = {name.split(".")[1] for name in imported_modules(file) if name.startswith("coexec.")}
        assert parts <= ALLOWED[part] | {part}, f"{file} imports {sorted(parts - ALLOWED[part])}"


@pytest.mark.parametrize("place", NO_TORCH)
def test_algorithms_import_no_torch(place: str) -> None:
    for file in python_files(place):
        assert not {name for name in imported_modules(file) if name.split(".")[0] == "torch"}, file


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    optional = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    # A backend's package is an extra, and only the backend's own folder imports it.
    backends = python_files("backends/candidates")
    always = third_party(file for file in SOURCE.rglob("*.py") if file not in backends)
    assert always == import_names(project["dependencies"])
    assert third_party(backends) <= always | import_names(optional)


def third_party(files: Iterable[Path]) -> set[str]:
    imported = {name.split(".")[0] for file in files for name in imported_modules(file)}
    return imported - set(sys.stdlib_module_names) - {"coexec"}


def import_names(requirements: Iterable[str]) -> set[str]:
    names = {re.split(r"[<>=!\[;]", requirement)[0] for requirement in requirements}
    return {IMPORTED_AS.get(name, name) for name in names}


def test_every_folder_says_what_it_takes_and_returns() -> None:
    for folder in {file.parent for file in SOURCE.glob("*/*.py") if file.name != "__init__.py"}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        missing = [word for word in ("Takes", "Returns", "Next") if word not in text]
        assert not missing, f"{folder.name}/__init__.py: the docstring lacks {missing}"
