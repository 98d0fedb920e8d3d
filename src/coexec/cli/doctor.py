"""`coexec doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from coexec.cli.output import print_json, print_line, print_table
from coexec.cli.parameters import json_option

if TYPE_CHECKING:
    from coexec.report.diagnosis import BackendState, Diagnosis


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Look at Python, torch, the compiler, the processor, the store and every backend.

    Names what is missing, what to do about it, and the versions that would work. Exit status 1 if something that
    coexec needs is missing; a backend that is not installed is no problem.

    \b
    Example:
      coexec doctor --json | jq '.backends[] | select(.usable | not)'
    """
    from coexec.report.diagnosis import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json({"ok": diagnosis.ok, "checks": diagnosis.checks, "backends": diagnosis.backends})
    else:
        _print(diagnosis)
    return 0 if diagnosis.ok else 1


def _print(diagnosis: Diagnosis) -> None:
    print_table(
        ("part", "status", "found", "advice"),
        [(check.part, check.status, check.found, check.advice) for check in diagnosis.checks],
        folded=("found", "advice"),
    )
    print_line()
    print_table(
        ("backend", "usable", "version", "why not"),
        [(state.name, "yes" if state.usable else "no", state.version, _why_not(state)) for state in diagnosis.backends],
        folded=("version", "why not"),
    )


def _why_not(state: BackendState) -> str:
    """The reason, and the versions that would work."""
    return f"{state.reason}; works with {state.works_with}" if state.works_with else state.reason
