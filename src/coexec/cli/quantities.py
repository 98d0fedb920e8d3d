"""Quantities as people read them: sizes, durations, ages."""

from __future__ import annotations

import time

_STEPS_S = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size(number_of_bytes: int | None) -> str | None:
    """`1536` -> "1.5 KiB"; None stays None."""
    if number_of_bytes is None:
        return None
    value, units = float(number_of_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float | None) -> str | None:
    """`0.00123` -> "1.23 ms"; None stays None."""
    if seconds is None:
        return None
    for step_s, unit in _STEPS_S:
        if seconds >= step_s:
            return f"{seconds / step_s:.1f} {unit}"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def age(moment_s: float, now_s: float | None = None) -> str:
    """A time of day as how long ago it was: "3 d ago", "just now"."""
    passed_s = (time.time() if now_s is None else now_s) - moment_s
    for step_s, unit in _STEPS_S:
        if passed_s >= step_s:
            return f"{passed_s / step_s:.0f} {unit} ago"
    return "just now"
