"""The checker of a trace: what `graph` relies on when it merges one."""

from __future__ import annotations

from collections.abc import Iterator

from coexec.errors import InternalError
from coexec.records import EXTERNAL, OpKind, OpRecord, Trace, ValueRef


def check_trace(trace: Trace) -> None:
    """Raises InternalError with the first problem of `find_problems`."""
    for problem in find_problems(trace):
        raise InternalError(f"Malformed trace: {problem}.")


def find_problems(trace: Trace) -> Iterator[str]:
    """Yields every broken invariant as text.

    Invariants:
    1. an input is an output of an earlier op, or an existing external;
    2. `writes` are positions in `inputs`, each at most once; a VIEW or a FETCH writes nothing;
    3. `aliases` is empty or has one entry per output: a position in `inputs`, or -1;
    4. a uid occurs at most once, since it contains the occurrence ordinal within the iteration, but for folded ops;
    5. matched ops (`node` >= 0) come first: only a validated prefix is matched before the merge.
    """
    seen: dict[int, int] = {}
    prefix_ended = False
    for index, op in enumerate(trace.ops):
        where = f"op {index} ({op.op})"
        yield from (f"{where} {problem}" for problem in _op_problems(trace, index, op))
        if op.uid in seen and not (op.folded and trace.ops[seen[op.uid]].folded):
            yield f"{where} has the uid {op.uid:#x} of op {seen[op.uid]}"
        seen[op.uid] = index
        if op.node >= 0 and prefix_ended:
            yield f"{where} is matched with node {op.node} after an unmatched op"
        prefix_ended = prefix_ended or op.node < 0


def _op_problems(trace: Trace, index: int, op: OpRecord) -> Iterator[str]:
    for position, ref in enumerate(op.inputs):
        if not _exists(trace, index, ref):
            yield f"reads {ref} at input {position}, which does not exist there"
    positions = range(len(op.inputs))
    if any(position not in positions for position in op.writes) or len(set(op.writes)) != len(op.writes):
        yield f"writes inputs {op.writes}, but has {len(op.inputs)}"
    if op.writes and op.kind in (OpKind.VIEW, OpKind.FETCH):
        yield f"is a {op.kind.name} and writes inputs {op.writes}"
    if op.aliases and len(op.aliases) != op.n_outputs:
        yield f"has {len(op.aliases)} aliases for {op.n_outputs} outputs"
    if any(position != -1 and position not in positions for position in op.aliases):
        yield f"aliases inputs {op.aliases}, but has {len(op.inputs)}"


def _exists(trace: Trace, index: int, ref: ValueRef) -> bool:
    if ref.producer == EXTERNAL:
        return -1 <= ref.output < len(trace.externals)
    return 0 <= ref.producer < index and 0 <= ref.output < trace.ops[ref.producer].n_outputs
