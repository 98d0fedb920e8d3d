"""`coexec recheck`: do stored decisions still hold on this machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from coexec.cli import quantities
from coexec.cli.db import SHOWN, no_such_subgraph, strict_store
from coexec.cli.output import error_console, print_json, print_line, print_table
from coexec.cli.parameters import Duration, json_option

if TYPE_CHECKING:
    from coexec.report.recheck import Recheck
    from coexec.subgraphs.entries import Decision
    from coexec.subgraphs.store import Store

TIMEOUT_HELP = "Longest wait for one answer of a child process."


@click.command()
@click.argument("subgraphs", nargs=-1)
@click.option("--threads", type=click.IntRange(min=1), help="Intra-op threads; default: torch's here.")
@click.option("--rounds", type=click.IntRange(min=2), default=9, show_default=True, help="Fewest rounds of a timing.")
@click.option("--timeout", "timeout_s", type=Duration(), default="4m", show_default=True, help=TIMEOUT_HELP)
@json_option
def recheck(subgraphs: tuple[str, ...], threads: int | None, rounds: int, timeout_s: float, as_json: bool) -> int:
    """Time the stored backends against eager again, by turns in processes of their own.

    What runs are the stored artifacts, verified anew. SUBGRAPHS are beginnings of digests; default: all that have a
    decision for this machine, torch and thread count. Exit status 1 if a decision does not hold: it fails, is wrong,
    or is slower than eager.

    \b
    Example:
      coexec recheck 3f9c2ab8
    """
    from coexec.report.recheck import recheck as check

    store = strict_store()
    _check_known(store, subgraphs)
    found = check(
        store,
        subgraphs=subgraphs,
        threads=threads,
        rounds=(rounds, 3 * rounds),
        timeout_s=timeout_s,
        listener=_announce,
    )
    if as_json:
        print_json([{**_entry(row), "holds": row.holds, "wide": row.wide} for row in found])
    else:
        _print(found)
    return 0 if all(row.holds for row in found) else 1


def _check_known(store: Store, beginnings: tuple[str, ...]) -> None:
    """Each is the beginning of a stored digest. Errors: click.UsageError names the first that is none."""
    digests = [info.digest for info in store.subgraphs()] if beginnings else []
    for beginning in beginnings:
        if not any(digest.startswith(beginning) for digest in digests):
            raise no_such_subgraph(beginning)


def _announce(decision: Decision, total: int) -> None:
    console = error_console()
    if console.is_terminal:
        console.print(f"{decision.subgraph[:SHOWN]} {decision.backend} (of {total})", style="dim")


def _entry(row: Recheck) -> dict[str, object]:
    names = ("subgraph", "note", "backend", "decided", "outcome", "detail", "timing", "busy_cores")
    return {name: getattr(row, name) for name in names}


def _measured(row: Recheck) -> str | None:
    """The ratio with its interval; the interval alone where its middle means nothing."""
    if row.timing is None:
        return None
    interval = f"[{row.timing.low:.2f}, {row.timing.high:.2f}]"
    return f"too wide: {interval}" if row.wide else f"{row.timing.ratio:.2f}x {interval}"


def _print(found: tuple[Recheck, ...]) -> None:
    if not found:
        print_line("No decision for this machine, torch and thread count names a backend; see `coexec db list`.")
        return
    print_table(
        ("subgraph", "backend", "decided", "now, 95% interval", "eager", "outcome", "note"),
        [
            (
                row.subgraph[:SHOWN],
                row.backend,
                None if row.decided is None else f"{row.decided:.2f}x",
                _measured(row),
                None if row.timing is None else quantities.duration(row.timing.eager_s),
                f"{row.outcome}{': ' if row.detail else ''}{row.detail}",
                row.note,
            )
            for row in found
        ],
        right=("decided", "eager"),
    )
    if wide := [row for row in found if row.wide]:
        print_line()
        busy = max(row.busy_cores for row in wide)
        print_line(
            f"{len(wide)} of {len(found)} intervals are too wide to tell how fast the backend is (other processes kept "
            f"up to {busy:.1f} cores busy): run it again on an idle machine, or with more --rounds."
        )
    broken = [row.subgraph[:SHOWN] for row in found if not row.holds]
    if broken:
        print_line()
        print_line(f"{len(broken)} do not hold; try: coexec tune --retune {' '.join(broken)}")
