"""Parameters that several commands share: `--json`, sizes, durations, candidate lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def json_option(command: C) -> C:
    """Adds `--json`, which the command gets as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of a table.")(command)


class ByteSize(click.ParamType[int]):
    """A size in bytes: 1048576, 500M, 2G (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Returns bytes. Errors: a usage error that names the value."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no size; try 500M or 2G", parameter, context)
        return int(float(match[1]) * _BYTES[match[2].upper()])


class Duration(click.ParamType[float]):
    """A duration in seconds: 90, 90s, 15m, 2h, 30d."""

    name = "duration"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Returns seconds. Errors: a usage error that names the value."""
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no duration; try 90s, 15m, 2h or 30d", parameter, context)
        return float(match[1]) * _SECONDS[match[2].lower()]


class Names(click.ParamType[tuple[str, ...]]):
    """Names separated by commas: onnxruntime,openvino."""

    name = "names"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, ...]:
        """Returns the names. Errors: a usage error if there is none."""
        names = tuple(name.strip() for name in str(value).split(",") if name.strip())
        if not names:
            self.fail(f"{value!r} names nothing; try onnxruntime,openvino", parameter, context)
        return names
