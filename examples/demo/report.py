"""Shows a race: one table per program, the loss curves, and the time of every step."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from examples.demo.race import Lane, Race
from examples.demo.variants import EAGER

matplotlib.use("Agg")

# Rounding differences grow while training goes on. After 150 steps of these two programs a float64 run and
# torch.compile were 2e-6 and 2e-5 from eager, as a share of the way that training had moved the parameters.
AGREE_DISTANCE = 1e-3
COLOURS = {"eager": "#777777", "torch.compile": "#d9822b", "coexec": "#1f6fb4"}


def make_table(race: Race) -> Table:
    """Returns the table of one program: a row per measure, a column per variant."""
    table = Table(title=f"{race.program}: {race.steps} steps", title_justify="left")
    table.add_column("")
    for lane in race.lanes:
        table.add_column(lane.variant, justify="right")
    reference = next(lane for lane in race.lanes if lane.variant == EAGER)
    columns = [cells_of(lane, reference) for lane in race.lanes]
    for measure in columns[0]:
        table.add_row(measure, *(column[measure] for column in columns))
    return table


def cells_of(lane: Lane, reference: Lane) -> dict[str, str]:
    """Returns the cells of one lane, by measure."""
    first_fast_s, median_s = lane.first_fast_s(), lane.median_s
    ratio = reference.median_s / median_s if reference.median_s and median_s else None
    last = lane.losses[-20:]
    return {
        "ms per step, by turns": f"{median_s * 1e3:.1f}" if median_s else "-",
        "speed against eager": f"{ratio:.2f}x" if ratio else "-",
        "first fast step after": f"{first_fast_s:.1f} s" if first_fast_s is not None else "-",
        "loss, last 20 steps": f"{sum(last) / len(last):.4f}" if last else "-",
        "parameters": agreement(lane, reference),
        **coexec_cells(lane),
    }


def agreement(lane: Lane, reference: Lane) -> str:
    """Returns whether the parameters agree with eager's, and their distance."""
    if lane is reference:
        return "reference"
    distance = lane.parameter_distance(reference)
    if distance is None or len(lane.losses) != len(reference.losses):
        return "did not finish" if lane.losses else "did not run"
    return f"{'agree' if distance <= AGREE_DISTANCE else 'DIFFER'} ({distance:.0e})"


def coexec_cells(lane: Lane) -> dict[str, str]:
    """Returns phase, fallbacks and segments as coexec counts them; dashes for the other variants."""
    if lane.stats is None:
        return dict.fromkeys(("phase", "fallbacks", "segments"), "-")
    segments = ", ".join(f"{count} {name}" for name, count in sorted(lane.stats.segments.items()))
    return {
        "phase": str(lane.stats.phase),
        "fallbacks": str(sum(lane.stats.fallbacks.values())),
        "segments": segments or "none",
    }


def reasons(race: Race) -> list[str]:
    """Returns one line per reason for a fallback, and per lane that ended early."""
    lines = [f"{lane.variant}: {lane.problem}" for lane in race.lanes if lane.problem]
    for lane in race.lanes:
        if lane.stats is not None:
            lines += [f"{lane.variant}: {count} x {reason}" for reason, count in lane.stats.fallbacks.items()]
    return lines


def plot_losses(races: list[Race], path: Path) -> None:
    """Writes the loss of every step of every lane."""
    figure, axes = plt.subplots(1, len(races), figsize=(6 * len(races), 4), squeeze=False)
    for axis, race in zip(axes[0], races, strict=True):
        for number, lane in enumerate(race.lanes):
            axis.plot(smooth(lane.losses), label=lane.variant, color=COLOURS.get(lane.variant), lw=3 - number)
        decorate(axis, race, "loss, mean of 10 steps (nats)")
    save(figure, path)


def plot_step_times(races: list[Race], path: Path) -> None:
    """Writes the duration of every step of every lane, on a logarithmic scale: compilation shows as a spike."""
    figure, axes = plt.subplots(1, len(races), figsize=(6 * len(races), 4), squeeze=False)
    for axis, race in zip(axes[0], races, strict=True):
        for lane in race.lanes:
            times_ms = [duration_s * 1e3 for duration_s in lane.times_s]
            axis.plot(times_ms, ".", ms=3, label=lane.variant, color=COLOURS.get(lane.variant))
        axis.set_yscale("log")
        decorate(axis, race, "time of the step (ms)")
    save(figure, path)


def smooth(values: list[float], window: int = 10) -> list[float]:
    """Returns the running mean over the last `window` values."""
    sums = [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]
    return sums


def decorate(axis: Axes, race: Race, label: str) -> None:
    """Titles one panel."""
    axis.set_title(race.program)
    axis.set_xlabel("step")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.legend()


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG and frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
