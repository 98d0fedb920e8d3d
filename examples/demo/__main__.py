"""`make demo`: trains a small GPT and a digit classifier eagerly, with torch.compile and with coexec, and compares."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo import report
from examples.demo.race import Race, run_race
from examples.demo.variants import COEXEC, EAGER, PROGRAMS, TORCH_COMPILE

STEPS = 300
VARIANTS = [EAGER, TORCH_COMPILE, COEXEC]


def main() -> None:
    """Runs the demo."""
    options = parse_arguments()
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)  # their warnings would cut the progress bar
    console = Console(width=None if sys.stdout.isatty() else 100)
    started_s = time.perf_counter()
    names = [name for name in VARIANTS if name in options.variants]
    races = [race_with_progress(program, names, options.steps, console) for program in options.programs]
    for race in races:
        console.print(report.make_table(race))
        for line in report.reasons(race):
            console.print(f"  {line}")
    report.plot_losses(races, options.out / "loss.png")
    report.plot_step_times(races, options.out / "step_time.png")
    write_explanations(races, options.out)
    minutes = (time.perf_counter() - started_s) / 60
    console.print(f"Plots and coexec's own account are in {options.out}/. The demo took {minutes:.1f} minutes.")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="eager is needed to compare")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per program and variant (at least 100)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the plots")
    options = parser.parse_args()
    if options.steps < 100:
        parser.error("--steps must be at least 100: 80 of them warm up")
    if EAGER not in options.variants:
        parser.error("--variants must contain eager: the others are compared with it")
    return options


def race_with_progress(program: str, names: list[str], steps: int, console: Console) -> Race:
    """Runs one program behind a live progress bar; in a pipe a line says what begins."""
    if not console.is_terminal:
        return run_race(program, names, steps, said_once(program))
    columns = [TextColumn("[bold]{task.fields[program]:<7}"), BarColumn(), TextColumn("{task.completed:>4.0f} steps")]
    with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("building", total=steps * len(names), program=program)
        return run_race(program, names, steps, lambda what, done: progress.update(task, description=what, advance=done))


def said_once(program: str) -> Callable[[str, int], None]:
    """A listener that prints what is going on whenever that changes."""
    last = ""

    def listen(what: str, done: int) -> None:
        nonlocal last
        if what != last:
            print(f"{program}: {what}", flush=True)
        last = what

    return listen


def write_explanations(races: list[Race], folder: Path) -> None:
    """Writes what `step.explain()` says, one file per program."""
    folder.mkdir(parents=True, exist_ok=True)
    for race in races:
        for lane in race.lanes:
            if lane.explanation:
                (folder / f"explain_{race.program}.txt").write_text(lane.explanation + "\n")


if __name__ == "__main__":
    main()
