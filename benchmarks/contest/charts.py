"""The two charts of the page: training speed (the paper's Figure 5) and where a step's time goes (its Figure 6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contest.contenders import COEXEC, COEXEC_KEPT, COEXEC_REPLAY, TORCH_COMPILE

PARTS = {
    "python_exec_ms": "#3b6ea5",
    "python_stall_ms": "#b8cfe6",
    "graph_exec_ms": "#b5533c",
    "graph_stall_ms": "#ebc4b8",
}
BAR = 0.27


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the charts as SVG and returns their paths; none if nothing was measured."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "coexec"  # the same figures make the same file
    entries = {name: entry["contenders"] for name, entry in result["programs"].items() if "contenders" in entry}
    if not entries:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [draw_speed(entries, folder / "speed.svg"), draw_breakdown(entries, folder / "breakdown.svg")]


def draw_speed(entries: dict[str, Any], path: Path) -> Path:
    """Bars of the best torch.compile, coexec, and coexec without the compiler, by eager's throughput."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4))
    places = np.arange(len(entries))
    for shift, (label, values) in enumerate(speeds(entries).items()):
        middles = [value["median"] if value else np.nan for value in values]
        spread = [
            [v["median"] - v["low"] if v else 0 for v in values],
            [v["high"] - v["median"] if v else 0 for v in values],
        ]
        axes.bar(places + (shift - 1) * BAR, middles, BAR, yerr=spread, label=label, error_kw={"elinewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [*entries], rotation=30, ha="right")
    axes.set_ylabel("throughput by eager's")
    axes.legend(fontsize=8)
    return save(figure, path)


def speeds(entries: dict[str, Any]) -> dict[str, list[dict[str, float] | None]]:
    """Returns the speedups per legend entry and program; None where a contender did not run."""

    def of(found: dict[str, Any], name: str) -> dict[str, float] | None:
        return found[name]["speedup"] if name in found else None

    def best(found: dict[str, Any]) -> dict[str, float] | None:
        known = [found[way.name]["speedup"] for way in TORCH_COMPILE if way.name in found]
        return max(known, key=lambda speedup: speedup["median"], default=None)

    return {
        "best torch.compile": [best(found) for found in entries.values()],
        "coexec": [of(found, COEXEC) for found in entries.values()],
        "coexec, replay": [of(found, COEXEC_REPLAY) for found in entries.values()],
    }


def draw_breakdown(entries: dict[str, Any], path: Path) -> Path:
    """Two stacked bars per program: the PythonRunner's and the GraphRunner's milliseconds, working and waiting."""
    import matplotlib.pyplot as plt

    kept = {name: found.get(COEXEC_KEPT, {}) for name, found in entries.items()}
    shown = {name: found["per_step"] for name, found in kept.items() if "per_step" in found}
    figure, axes = plt.subplots(figsize=(11, 4))
    places = np.arange(len(shown))
    bottoms = {"python": np.zeros(len(shown)), "graph": np.zeros(len(shown))}
    for part, colour in PARTS.items():
        runner = part.split("_")[0]
        heights = np.array([spent[part] for spent in shown.values()], dtype=float)
        shift = -BAR / 2 if runner == "python" else BAR / 2
        label = f"{runner} {'waits' if 'stall' in part else 'works'}"
        axes.bar(places + shift, heights, BAR, bottom=bottoms[runner], color=colour, label=label)
        bottoms[runner] += heights
    axes.set_xticks(places, [*shown], rotation=30, ha="right")
    axes.set_ylabel("milliseconds per step")
    axes.legend(fontsize=8)
    return save(figure, path)


def save(figure: Any, path: Path) -> Path:
    """Writes a figure without a date in it."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
