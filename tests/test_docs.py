"""The docs know every option, variable, error, statistic and command, and their links lead somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from coexec import config, errors
from coexec.runtime.stats import StepStats

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def missing_from_reference(names: list[str]) -> list[str]:
    return [name for name in names if f"`{name}`" not in REFERENCE]


def test_every_option_and_variable_has_an_entry() -> None:
    fields = (*dataclasses.fields(config.Options), *dataclasses.fields(config.Settings))
    names = [field.name for field in dataclasses.fields(config.Options)]
    names += [field.metadata["env"] for field in fields if field.metadata["env"]]
    assert missing_from_reference(names) == []


def test_every_value_of_an_option_has_an_entry() -> None:
    for field in dataclasses.fields(config.Options):
        row = next(line for line in REFERENCE.splitlines() if line.startswith(f"| `{field.name}`"))
        for choice in field.metadata["choices"]:
            assert f'"{choice}"' in row if isinstance(choice, str) else f"`{choice}`" in row


def test_every_error_has_an_entry_that_names_its_builtin_base() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert missing_from_reference([cls.__name__ for cls in classes]) == []
    for cls in classes:
        builtin = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception]
        row = next(line for line in REFERENCE.splitlines() if f"`{cls.__name__}`" in line)
        assert all(f"`{name}`" in row for name in builtin), row


def test_every_statistic_has_an_entry() -> None:
    assert missing_from_reference([field.name for field in dataclasses.fields(StepStats)]) == []


def test_every_make_target_has_an_entry() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert missing_from_reference([f"make {target}" for target in targets[1].split()]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for module in re.findall(r"python -m ((?:coexec|benchmarks|examples)[\w.]*)", text):
        place = (ROOT / "src" if module.startswith("coexec") else ROOT) / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_every_test_of_the_checklist_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "checklist.md").read_text()))
    found = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 50
    assert sorted(named - found) == []


def test_layout_lists_every_folder_of_the_package() -> None:
    layout = (ROOT / "docs" / "layout.md").read_text()
    folders = [path.parent.name for path in (ROOT / "src" / "coexec").glob("*/__init__.py")]
    assert [name for name in folders if f"`{name}/`" not in layout] == []
