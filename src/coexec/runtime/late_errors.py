"""A kernel's error comes at a wait or at the step's end: it is given the traceback that eager's would have."""

from __future__ import annotations

import dis
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Any

from coexec.errors import InternalError
from coexec.intercept.kernel_warnings import line_of
from coexec.runtime.history import user_line

_RAISES = compile("raise NameError", "", "exec")


def name_the_line(error: BaseException, native: Any) -> None:
    """Adds to the error of a kernel a note that names its line, and the frames that led to its op."""
    fallback = native.fallback
    if fallback is None or fallback[0] != "kernel error":
        return
    chain = native.chain(fallback[2])
    note = f"coexec: raised by {fallback[1]} at {user_line(chain)}"
    if note in getattr(error, "__notes__", ()):  # it may be met at several waits
        return
    error.add_note(note)
    error.__traceback__ = _followed_by(error.__traceback__, traceback_of(chain))


def same_error(error: BaseException, earlier: BaseException | None) -> bool:
    """Whether the step's own thread has met this kernel's error already: it is thrown anew at each wait."""
    return type(error) is type(earlier) and str(error) == str(earlier)


def traceback_of(chain: list[tuple[CodeType, int]]) -> TracebackType | None:
    """Returns a traceback through the instructions of `chain`, (code object, byte offset), innermost first.

    Its frames have the names, files and lines of the real ones, which are gone, and no variables.
    """
    inner: TracebackType | None = None
    for code, offset in chain:
        frame = _stand_in(code)
        inner = TracebackType(inner, frame, offset, line_of(code, offset))
    return inner


def _stand_in(code: CodeType) -> FrameType:
    """Returns a frame whose code has the name, file and line table of `code`, and does nothing but end."""
    # Positions are looked up by offset, so the instructions must be as many.
    body = _RAISES.co_code + bytes([dis.opmap["NOP"], 0]) * ((len(code.co_code) - len(_RAISES.co_code)) // 2)
    fake = code.replace(
        co_code=body, co_consts=_RAISES.co_consts, co_names=_RAISES.co_names, co_flags=_RAISES.co_flags,
        co_stacksize=_RAISES.co_stacksize, co_exceptiontable=b"", co_argcount=0, co_posonlyargcount=0,
        co_kwonlyargcount=0, co_nlocals=0, co_varnames=(), co_freevars=(), co_cellvars=(),
    )  # fmt: skip
    try:
        exec(fake, {})
    except NameError as raised:
        return [frame for frame, _ in traceback.walk_tb(raised.__traceback__)][-1]
    raise InternalError("the stand-in for a frame did not raise")


def _followed_by(outer: TracebackType | None, inner: TracebackType | None) -> TracebackType | None:
    """Returns `outer` with `inner` as what it called."""
    if outer is None:
        return inner
    last = outer
    while last.tb_next is not None:
        last = last.tb_next
    if inner is not None:
        last.tb_next = inner
    return outer
