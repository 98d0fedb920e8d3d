"""The command as a shell sees it: help, exit statuses, pipes, and what is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from coexec.cli.app import INTERRUPTED, PIPE_CLOSED, PROBLEM, USAGE, coexec, main
from tests.cli.conftest import Run
from tests.pipes import abandoned

ROOT = Path(__file__).resolve().parents[2]


def commands(
    group: click.Group = coexec, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words, groups left out."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_json_and_help_with_an_example_of_itself(words: tuple[str, ...], run: Run) -> None:
    answer = run(*words, "--help")
    assert answer.status == 0
    assert "--json" in answer.out
    assert f"coexec {' '.join(words)}" in answer.out.split("Example", 1)[1]


def test_the_reference_lists_every_command() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert [words for words in COMMANDS if f"`coexec {' '.join(words)}" not in reference] == []


def test_wrong_usage_is_2_and_says_what_to_write(run: Run) -> None:
    answer = run("db", "prune", "--unused", "3x")
    assert answer.status == USAGE
    assert "try 90s, 15m, 2h or 30d" in answer.err
    assert answer.out == ""


def test_an_option_value_from_the_environment_is_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DEBUG", "9")
    answer = run("db", "list")
    assert answer.status == USAGE
    assert "COEXEC_DEBUG" in answer.err


def test_a_store_that_cannot_serve_is_a_problem_in_one_line(run: Run, home: Path) -> None:
    folder = home / "cache" / "subgraphs"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "store.sqlite").write_bytes(b"this is no database" * 200)
    answer = run("db", "list")
    assert answer.status == PROBLEM
    assert "coexec db verify --repair" in answer.err
    assert len(answer.err.splitlines()) == 1


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(coexec.commands["doctor"], "callback", interrupt)
    assert main(["doctor"]) == INTERRUPTED


def in_a_process(script: str, home: Path, **streams: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COEXEC_CACHE_DIR": str(home / "cache")}
    return subprocess.Popen([sys.executable, "-c", script], text=True, env=environment, **streams)


@pytest.mark.parametrize("words", [["--help"], ["db", "list"], ["db", "stats"], ["db", "key"]], ids=" ".join)
def test_tools_of_the_store_start_without_torch(words: list[str], home: Path) -> None:
    script = f"""
import sys
from coexec.cli.app import main
assert main({words!r}) == 0
assert "torch" not in sys.modules
"""
    assert in_a_process(script, home, stdout=subprocess.DEVNULL).wait() == 0


def test_a_reader_that_goes_away_ends_the_command_quietly(home: Path) -> None:
    script = "from coexec.cli.app import main; input(); raise SystemExit(main(['--help']))"
    pipe = subprocess.PIPE
    process = in_a_process(script, home, stdin=pipe, stdout=pipe, stderr=pipe)
    assert abandoned(process) == ""
    assert process.returncode == PIPE_CLOSED


def test_a_pipe_gets_no_terminal_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = run("doctor").out
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_the_public_names_are_there_without_naming_the_module_they_live_in() -> None:
    import coexec as package
    from coexec import api

    assert package.compile is api.compile
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        package.compil  # noqa: B018 - the access is what is tested
