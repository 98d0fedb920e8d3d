"""What a step is called, and where its code begins: for people who look for it in `explain()` or in the database."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch


def name_of(function: Callable[..., Any]) -> str:
    """`Trainer.step`; of a module's call the module's class."""
    owner = _called_module(function)
    return type(owner).__qualname__ if owner is not None else getattr(function, "__qualname__", repr(function))


def place_of(function: Callable[..., Any]) -> str:
    """ "train.py:12", where the function or the module's `forward` begins; "" for what is not written in Python."""
    owner = _called_module(function)
    found: Any = type(owner).forward if owner is not None else function
    while isinstance(found, functools.partial):
        found = found.func
    if not hasattr(found, "__code__") and not hasattr(found, "__func__"):
        found = type(found).__call__
    code = getattr(inspect.unwrap(found), "__code__", None)
    return short_place(code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ""


def short_place(file: str, line: int) -> str:
    """ "train.py:12" """
    return f"{Path(file).name}:{line}"


def _called_module(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module whose call `function` is; None if it is anything else, another method of a module included."""
    owner = getattr(function, "__self__", None)
    is_call = getattr(function, "__func__", None) is torch.nn.Module.__call__
    return owner if is_call and isinstance(owner, torch.nn.Module) else None
