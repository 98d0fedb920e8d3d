"""`coexec bench` hands its options to the benchmark of the checkout, and says so where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from benchmarks.contest.__main__ import parser
from coexec.cli import bench as module
from coexec.cli.app import PROBLEM, USAGE, coexec
from tests.cli.conftest import Run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that would have been run."""
    lines: list[list[str]] = []

    def note(line: list[str], **options: Any) -> SimpleNamespace:
        lines.append(line)
        return SimpleNamespace(returncode=len(lines) - 1)

    monkeypatch.setattr(subprocess, "run", note)
    return lines


def test_options_reach_the_benchmark(run: Run, started: list[list[str]]) -> None:
    words = ["gpt2", "moe", "--rounds", 3, "--settle", "2m", "--contenders", "compile, coexec", "--tiny", "--json"]
    assert run("bench", *words).status == 0
    (line,) = started
    assert line[:3] == [sys.executable, "-m", "benchmarks.contest"]
    parsed = parser().parse_args(line[3:])
    assert (parsed.programs, parsed.rounds, parsed.settle) == (["gpt2", "moe"], 3, 120.0)
    assert (parsed.contenders, parsed.tiny, parsed.json, parsed.no_convert) == (
        ["compile", "coexec"],
        True,
        True,
        False,
    )
    assert run("bench").status == 1, "the benchmark's own exit status"
    assert started[1][3:] == []


def test_every_option_of_the_benchmark_is_an_option_of_the_command() -> None:
    theirs = {action.dest for action in parser()._actions} - {"help"}
    command = coexec.commands["bench"]
    ours = {parameter.name for parameter in command.params}
    assert (ours - {"as_json"}) | {"json"} == theirs
    assert isinstance(command, click.Command)


def test_without_a_checkout_it_says_where_the_programs_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "bench.py"))
    answer = run("bench")
    assert answer.status == PROBLEM
    assert "clone the repository" in answer.err


def test_a_checkout_is_found_from_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks" / "contest").mkdir(parents=True)
    (tmp_path / "benchmarks" / "contest" / "__main__.py").touch()
    monkeypatch.chdir(tmp_path / "benchmarks")
    assert module.checkout() == tmp_path


def test_wrong_numbers_are_wrong_usage(run: Run) -> None:
    assert run("bench", "--rounds", 1).status == USAGE
