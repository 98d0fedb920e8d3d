"""What a command writes: JSON, or tables and lines that look the same on a terminal and stay plain in a pipe."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 10_000
"""A pipe has no width: nothing is wrapped or cut there, so that grep and awk see whole rows."""

FOLDED_WIDTH = 80
"""In a pipe, of a table of sentences: they are folded as on a terminal, into more lines, and nothing is lost."""

STYLES = {"ok": "green", "info": "", "warning": "yellow", "problem": "bold red"}


def print_json(value: Any) -> None:
    """Writes `value` as one JSON document; dataclasses become objects, paths text."""
    json.dump(value, sys.stdout, default=_plain, indent=1)
    sys.stdout.write("\n")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not asdict(): it copies what is no dataclass with deepcopy, which a read-only mapping refuses.
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_line(text: str = "", style: str = "") -> None:
    """Writes one line, which a terminal may wrap."""
    _console().print(text, style=style or None, soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    folded: Iterable[str] = (),
) -> None:
    """Writes a table.

    Args:
        columns: the headings.
        rows: one cell per column; `None` is shown as "-". A cell that is a key of STYLES is coloured.
        right: the headings of the columns that hold numbers.
        folded: the headings of those that hold sentences, which are folded to the width at hand; the others are not.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    numbers, sentences = set(right), set(folded)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        whole = bool(sentences) and column not in sentences
        table.add_column(column, justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    if sentences:
        console.width = FOLDED_WIDTH
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():  # cells are padded to the longest one of their column
        sys.stdout.write(line.rstrip() + "\n")


def print_entries(entries: Mapping[str, object]) -> None:
    """Writes "name  value" lines, one entry each, values below each other."""
    width = max((len(name) for name in entries), default=0)
    for name, value in entries.items():
        print_line(f"{name:<{width}}  {'-' if value is None else value}")


def _cell(value: object) -> Any:
    from rich.text import Text

    text = "-" if value is None else str(value)
    return Text(text, style=STYLES.get(text, ""))


def _console() -> Console:
    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def error_console() -> Console:
    """The console on stderr: progress bars, so that stdout holds the result alone."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)
