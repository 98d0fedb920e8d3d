"""`coexec tune`: the offline autotuner with a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from coexec.cli import quantities
from coexec.cli.output import error_console, print_json, print_line, print_table
from coexec.cli.parameters import ByteSize, Duration, Names, json_option

if TYPE_CHECKING:
    from coexec.tuning import GraphReport, Progress, TuneReport

SHOWN = 16

ONLY_HELP = (
    "prepare: build and verify, which other work may run beside; time: what is prepared, on a quiet machine; "
    "default: both."
)


# Defaults are the tuner's own (tuning/settings.py), which only the help repeats.
@click.command()
@click.argument("subgraphs", nargs=-1)
@click.option("--budget", "budget_s", type=Duration(), help="Time for the whole run, as in 10m; default: no limit.")
@click.option("--per-graph", "per_graph_s", type=Duration(), help="Time for one subgraph; default: 15m.")
@click.option("--per-attempt", "attempt_s", type=Duration(), help="Time for one backend on one subgraph; default: 4m.")
@click.option("--memory", "memory_bytes", type=ByteSize(), help="Memory of one attempt, as in 8G; default: 16G.")
@click.option("--candidates", type=Names(), help="Backends to try, separated by commas; default: all usable ones.")
@click.option("--threads", type=click.IntRange(min=1), help="Intra-op threads that will serve; default: torch's here.")
@click.option("--workers", type=click.IntRange(min=1), help="Subgraphs worked on at once, timed by turns; default: 1.")
@click.option("--only", type=click.Choice(("prepare", "time")), help=ONLY_HELP)
@click.option("--retune", is_flag=True, help="Begin anew with what is decided already.")
@click.option("--ray", "with_ray", is_flag=True, help="Spread over a Ray cluster; COEXEC_STORE names the store.")
@json_option
def tune(subgraphs: tuple[str, ...], as_json: bool, with_ray: bool, **limits: Any) -> int:
    """Find the fastest right backend for every stored subgraph, and the fastest library for co-execution's segments.

    Each attempt runs in processes of its own; wrong, crashing, hanging and memory-eating backends are skipped and
    reported. Every finished attempt is in the store at once: stop at any time (Ctrl-C), the next run goes on.
    A segment's speedup is over the library that co-execution compiles by itself, a graph's over eager.
    SUBGRAPHS are beginnings of digests as `coexec db list` prints them; default: all that are not decided here, those
    first in which most time is spent, without segments that are too short for a difference to be measured.

    Exit status 1 if a subgraph could not be tuned for another reason than that the time of --budget was over.

    \b
    Examples:
      coexec tune --budget 30m
      coexec tune 3f9c2ab8 --candidates onnxruntime,openvino --retune
      coexec tune --only prepare; coexec tune --only time
    """
    from coexec.tuning import TuneSettings
    from coexec.tuning import tune as run_tuner

    given = {name: value for name, value in limits.items() if value is not None}
    if subgraphs:
        given["subgraphs"] = subgraphs
    _check_candidates(given.get("candidates", ()))
    if with_ray:
        from coexec.tuning.ray_workers import tune_with_ray

        report = tune_with_ray(TuneSettings(**given))
    else:
        with progress_bar() as listener:
            report = run_tuner(progress=listener, **given)
    if subgraphs and not report.graphs:
        raise click.UsageError(_nothing_to_tune(subgraphs, given.get("candidates", ())))
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    return 1 if failed_graphs(report) else 0


def _nothing_to_tune(subgraphs: tuple[str, ...], candidates: tuple[str, ...]) -> str:
    beginnings = " or ".join(subgraphs)
    if not candidates:
        return f"no stored subgraph with a program begins with {beginnings}"
    return (
        f"no stored subgraph with a program that {' or '.join(candidates)} could run begins with {beginnings}: graphs "
        "of torch.compile take the backends that `coexec doctor` names, co-execution's segments the variants of "
        "docs/design/tuning.md (`coexec db show` says which of the two it is)"
    )


def failed_graphs(report: TuneReport) -> list[GraphReport]:
    """Graphs that were left undecided for another reason than the budget of the run."""
    return [g for g in report.graphs if not (g.winner or g.prepared or g.passed_over or g.out_of_budget)]


def _check_candidates(names: tuple[str, ...]) -> None:
    from coexec.backends.candidates.registry import candidates
    from coexec.backends.variants import variants
    from coexec.errors import did_you_mean

    known = {**candidates(), **variants()}
    for name in names:
        if name not in known:
            raise click.UsageError(
                f"no backend is called {name!r}.{did_you_mean(name, known)} `coexec doctor` names the backends, "
                "docs/design/tuning.md the variants of segments"
            )


# Progress ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """A listener that draws on stderr while the block runs; None where stderr is no terminal."""
    console = error_console()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def listen(event: Progress) -> None:
            step = 1 if event.stage == "done" else 0
            bar.update(task, total=event.graphs, advance=step, description=describe(event))

        yield listen


def describe(event: Progress) -> str:
    """One event in words: "3f9c2ab8 model.py:31  onnxruntime: ok 1.83x"."""
    outcome = f" {event.outcome}" if event.outcome else f" {event.stage}"
    speedup = f" {event.speedup:.2f}x" if event.speedup is not None else ""
    candidate = f"{event.candidate}:" if event.candidate else ""
    return f"{event.subgraph[:8]} {event.note}  {candidate}{outcome}{speedup}"


# The result ----------------------------------------------------------------------------------------------------------


def _print(report: TuneReport) -> None:
    rows = [
        (
            graph.subgraph[:SHOWN],
            graph.winner or None,
            None if graph.speedup is None else f"{graph.speedup:.2f}x",
            f"{len(graph.attempts)}{'' if graph.complete else '+'}",
            graph.note,
            graph.reason,
        )
        for graph in report.graphs
    ]
    if not rows:
        print_line(
            "Nothing to tune. torch.compile(model, backend='coexec') stores the graphs that it meets, "
            "@coexec.compile the segments that it compiles."
        )
    else:
        print_table(("subgraph", "winner", "speedup", "tried", "note", "why"), rows, right=("speedup", "tried"))
        print_line()
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(report.outcomes().items()))
    took = quantities.duration(report.elapsed_s)
    print_line(f"{len(rows)} subgraphs in {took}; attempts: {outcomes or 'none'}.")
    if report.out_of_budget:
        print_line("The budget is spent; the next `coexec tune` goes on here.")
    for name, reason in report.unavailable.items():
        print_line(f"Not tried here: {name}: {reason}")
