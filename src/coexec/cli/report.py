"""`coexec report`: what the store holds and why, as text, JSON or an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from coexec.cli import quantities
from coexec.cli.db import SHOWN
from coexec.cli.output import print_json, print_line, print_table
from coexec.cli.parameters import json_option

if TYPE_CHECKING:
    from coexec.report.store_report import StoreReport


FIRST = 10
"""Lines of what waits."""


@click.command()
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one HTML page there.")
@json_option
def report(html: Path | None, as_json: bool) -> None:
    """Say which backend won how often, how each one fails, what was measured of every subgraph, and what waits.

    \b
    Example:
      coexec report --html store.html
    """
    from coexec.report.page import html_page
    from coexec.report.store_report import report_store
    from coexec.subgraphs.store import open_store

    open_store(strict=True).stats()  # a store that cannot serve is an error here, a damaged row in it is left out
    found = report_store(open_store())
    if html is not None:
        html.write_text(html_page(found), encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        _print(found)
        if html is not None:
            print_line(f"Wrote {html}.")


def _print(found: StoreReport) -> None:
    print_line(f"{found.url}: {len(found.subgraphs)} subgraphs, {len(found.waiting)} wait for `coexec tune`.")
    _print_backends(found)
    _print_waiting(found)


def _print_waiting(found: StoreReport) -> None:
    """The first ones in the tuner's order, and what it passes over."""
    if found.waiting:
        print_line()
        rows = [
            (row.digest[:SHOWN], row.n_ops, quantities.duration(row.run_s), row.runs or None, row.note)
            for row in found.rows_waiting()[:FIRST]
        ]
        print_table(("waits", "ops", "one run", "runs", "note"), rows, right=("ops", "one run", "runs"))
    if len(found.waiting) > FIRST:
        print_line(f"and {len(found.waiting) - FIRST} more: `coexec db list --undecided`")
    if passed_over := [row for row in found.subgraphs if row.passed_over]:
        print_line()
        print_table(
            ("passed over", "note", "why"), [(row.digest[:SHOWN], row.note, row.passed_over) for row in passed_over]
        )


def _print_backends(found: StoreReport) -> None:
    if not found.backends:
        return
    print_line()
    rows = [
        (
            row.backend,
            row.chosen,
            row.tried,
            ", ".join(f"{number} {outcome}" for outcome, number in sorted(row.outcomes.items())),
            None if row.mean_speedup is None else f"{row.mean_speedup:.2f}x",
            row.common_failure.partition("\n")[0][:100],
        )
        for row in found.backends
    ]
    columns = ("backend", "chosen", "tried", "outcomes", "mean speedup", "most frequent failure")
    print_table(columns, rows, right=("chosen", "tried", "mean speedup"))
