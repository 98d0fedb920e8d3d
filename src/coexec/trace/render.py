"""The printer of a trace: one op per line, in the words of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coexec.records import EXTERNAL, OpRecord, Trace, ValueRef

Locate = Callable[[int], str]
"""Turns a 64-bit program location into "file.py:12", for people."""


def render_trace(trace: Trace, locate: Locate | None = None) -> str:
    """Returns one line per op; `%3.1` is output 1 of op 3, `ext2` the external value 2, `!` marks a written input."""
    lines = [
        f"trace of {len(trace.ops)} ops, {len(trace.externals)} externals{'' if trace.complete else ', cut short'}"
    ]
    lines += [f"  {_outputs(index, op)}{_call(op)}{_notes(op, locate)}" for index, op in enumerate(trace.ops)]
    return "\n".join(lines)


def _outputs(index: int, op: OpRecord) -> str:
    names = ", ".join(f"%{index}" if op.n_outputs == 1 else f"%{index}.{k}" for k in range(op.n_outputs))
    return f"{names} = " if names else ""


def _call(op: OpRecord) -> str:
    inputs = [_value(ref) + ("!" if position in op.writes else "") for position, ref in enumerate(op.inputs)]
    return f"{op.op}({', '.join([*inputs, *map(repr, op.numbers)])})"


def _value(ref: ValueRef) -> str:
    if ref.producer == EXTERNAL:
        return f"ext{ref.output}"
    return f"%{ref.producer}" if ref.output == 0 else f"%{ref.producer}.{ref.output}"


def _notes(op: OpRecord, locate: Locate | None) -> str:
    notes = "".join(f"  {note}" for note in _note_words(op))
    return notes + (f"  # {locate(op.location)}" if locate else "")


def _note_words(op: OpRecord) -> Iterator[str]:
    if op.kind.name != "COMPUTE":
        yield op.kind.name.lower()
    if op.static:
        yield f"static={op.static!r}"
    if any(position >= 0 for position in op.aliases):
        yield f"aliases={op.aliases}"
    if op.random:
        yield "random"
    if op.folded:
        yield "folded"
    if op.node >= 0:
        yield f"node={op.node}"
