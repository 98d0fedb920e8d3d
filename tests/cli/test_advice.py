"""What messages and docs tell people to type exists."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from coexec.advice import how_to_install
from coexec.backends.candidates.installed import needs
from coexec.cli.app import coexec, main

ROOT = Path(__file__).resolve().parents[2]
FILES = [*ROOT.glob("src/coexec/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]
MENTION = re.compile(r"`(coexec [a-z][^`\n]*)`")


def mentions() -> dict[str, str]:
    """Every command in backticks, with a file that says it."""
    return {match: file.name for file in FILES for match in MENTION.findall(file.read_text())}


def unknown_part(words: list[str]) -> str:
    """The first word that is no command and no option, "" if all are known."""
    command: click.Command = coexec
    while isinstance(command, click.Group) and words:
        if words[0] not in command.commands:
            return words[0]
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return next((word for word in words if word.startswith("-") and word not in options), "")


@pytest.mark.parametrize("command", mentions())
def test_every_command_that_is_mentioned_exists(command: str) -> None:
    words = shlex.split(re.sub(r"[\[\]]", "", command))[1:]
    assert unknown_part(words) == "", f"{command!r} in {mentions()[command]}"


def test_the_check_of_mentions_finds_what_does_not_exist() -> None:
    assert unknown_part(["db", "defragment"]) == "defragment"
    assert unknown_part(["db", "prune", "--everything"]) == "--everything"
    assert len(mentions()) >= 8


def test_the_installed_script_is_this_program() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["coexec"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_what_is_missing_is_installed_from_a_checkout() -> None:
    assert how_to_install() == "in a checkout of coexec: pip install ."
    assert how_to_install("ray") == "in a checkout of coexec: pip install '.[ray]'"
    reason = needs({"no-such-distribution": ""}, "tvm").reason
    assert reason == "not installed: no-such-distribution; in a checkout of coexec: pip install '.[tvm]'"


def test_every_extra_that_is_advised_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.compile(r"(?:how_to_install\(|\bextra=)['\"](\w+)['\"]\)")
    found = {extra for file in FILES for extra in named.findall(file.read_text())}
    assert found == {"onnxruntime", "openvino", "postgresql", "ray", "tvm"}
    assert found <= extras.keys()


def test_nobody_is_told_to_get_coexec_from_a_package_index() -> None:
    assert [file for file in FILES if re.search(r"pip install ['\"]?coexec", file.read_text())] == []
