"""Random little programs with branches, loops and reorderings, and the traces of their runs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from coexec.records import EXTERNAL, ExternalRecord, OpKind, OpRecord, Trace, ValueRef

EXTERNALS = (ExternalRecord(0, 64), ExternalRecord(1, 1 << 20), ExternalRecord(2, 64, foreign=True))


@dataclass(frozen=True)
class Line:
    """One op of the program text."""

    location: int
    reads: tuple[int, ...]  # how many values back, 0 is the latest; beyond the first: an external
    kind: OpKind = OpKind.COMPUTE
    writes: bool = False  # its first input, which its output then aliases; a VIEW only aliases
    varying: bool = False  # its number differs between runs
    static: str = ""


@dataclass(frozen=True)
class Branch:
    """One of several bodies, drawn per run."""

    bodies: tuple[tuple[Statement, ...], ...]


@dataclass(frozen=True)
class Loop:
    """A body run 0 to `most` times, drawn per run."""

    body: tuple[Statement, ...]
    most: int


@dataclass(frozen=True)
class Shuffle:
    """Statements in an order drawn per run."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Pick:
    """Python forgets the latest values or keeps them: the next op's inputs differ on one and the same path."""

    most: int


Statement = Line | Branch | Loop | Shuffle | Pick
Program = tuple[Statement, ...]


class Run:
    """One run of a program: draws its decisions from `seed` and records the trace.

    `folded`: locations of ops whose passes are one node.
    """

    def __init__(self, seed: int, folded: frozenset[int] = frozenset()) -> None:
        self.draw = random.Random(seed)
        self.folded = folded
        self.ops: list[OpRecord] = []
        self.live: list[ValueRef] = []
        self.met: dict[int, int] = {}

    def body(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: Statement) -> None:
        match statement:
            case Line():
                self.line(statement)
            case Branch(bodies):
                self.body(self.draw.choice(bodies))
            case Loop(body, most):
                for _ in range(self.draw.randint(0, most)):
                    self.body(body)
            case Shuffle(body):
                self.body(self.draw.sample(body, len(body)))
            case Pick(most):
                del self.live[len(self.live) - min(self.draw.randint(0, most), len(self.live)) :]

    def line(self, line: Line) -> None:
        ordinal = self.met[line.location] = self.met.get(line.location, -1) + 1
        folded = line.location in self.folded
        inputs = tuple(self.value(back) for back in line.reads)
        outputs = 0 if line.kind in (OpKind.FETCH, OpKind.BARRIER) else 1
        shares = (line.writes or line.kind == OpKind.VIEW) and bool(inputs)
        writes = (0,) if shares and line.kind not in (OpKind.VIEW, OpKind.FETCH) else ()
        number = self.draw.random() if line.varying else 0.5
        self.ops.append(
            OpRecord(
                op=f"test::op{line.location}",
                uid=line.location * 1000 + (999 if folded else ordinal),
                location=line.location,
                kind=line.kind,
                static=(line.static,),
                numbers=(number, 3),
                inputs=inputs,
                n_outputs=outputs,
                writes=writes,
                aliases=((0,) if shares else (-1,)) if outputs else (),
                folded=folded,
            )
        )
        if outputs:
            self.live.append(ValueRef(len(self.ops) - 1, 0))

    def value(self, back: int) -> ValueRef:
        if back < len(self.live):
            return self.live[-1 - back]
        return ValueRef(EXTERNAL, (back - len(self.live)) % len(EXTERNALS))


def run(program: Program, seed: int, folded: frozenset[int] = frozenset()) -> Trace:
    """Returns the trace of one run."""
    recorder = Run(seed, folded)
    recorder.body(program)
    return Trace(tuple(recorder.ops), EXTERNALS)


def cut_short(trace: Trace, length: int) -> Trace:
    """Returns the trace of the same run if the step raises after `length` ops."""
    return Trace(trace.ops[:length], trace.externals, complete=False)


LINES = st.builds(
    Line,
    location=st.integers(1, 12),
    reads=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    kind=st.sampled_from([OpKind.COMPUTE] * 8 + list(OpKind)),
    writes=st.booleans(),
    varying=st.integers(0, 4).map(lambda n: n == 0),
    static=st.sampled_from(["", "", "", "x"]),
)


def _bodies(statement: st.SearchStrategy[Statement]) -> st.SearchStrategy[tuple[Statement, ...]]:
    return st.lists(statement, max_size=5).map(tuple)


STATEMENTS: st.SearchStrategy[Statement] = st.recursive(
    LINES,
    lambda inner: st.one_of(
        st.builds(Branch, st.lists(_bodies(inner), min_size=2, max_size=3).map(tuple)),
        st.builds(Loop, _bodies(inner), st.integers(1, 3)),
        st.builds(Shuffle, _bodies(inner)),
        st.builds(Pick, st.integers(1, 3)),
    ),
    max_leaves=20,
)

PROGRAMS: st.SearchStrategy[Program] = st.lists(STATEMENTS, min_size=1, max_size=10).map(tuple)

TRACES = st.builds(
    lambda program, seeds: [run(program, seed) for seed in seeds],
    PROGRAMS,
    st.lists(st.integers(0, 1000), min_size=1, max_size=6),
)
"""Traces of several runs of one program."""

FOLDED_TRACES = st.builds(
    lambda program, seeds, folded: [run(program, seed, folded) for seed in seeds],
    PROGRAMS,
    st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    st.frozensets(st.integers(1, 12), min_size=1),
)
"""Traces of several runs of one program with folded ops, in loops or not."""


def op(location: int, *inputs: int, number: object = 1, static: str = "", kind: OpKind = OpKind.COMPUTE) -> OpRecord:
    """Returns a hand-written op that reads output 0 of the given ops (-1: the first external)."""
    refs = tuple(ValueRef(index, 0) for index in inputs)
    return OpRecord(f"test::op{location}", location, location, kind, (static,), (number,), refs, 1)


def folded(location: int, *inputs: int, number: object = 1, kind: OpKind = OpKind.COMPUTE) -> OpRecord:
    """Returns a hand-written op of a folded loop."""
    return dataclasses.replace(op(location, *inputs, number=number, kind=kind), folded=True)


def folded_chain(*locations: int) -> Trace:
    """Returns a trace in which each op reads the one before it; those from 100 on are folded."""
    return trace(*((folded if place >= 100 else op)(place, index - 1) for index, place in enumerate(locations)))


def trace(*ops: OpRecord, complete: bool = True) -> Trace:
    """Returns a trace of hand-written ops."""
    return Trace(ops, EXTERNALS, complete)


def chain(*locations: int) -> Trace:
    """Returns a trace in which each op reads the one before it."""
    return trace(*(op(location, index - 1) for index, location in enumerate(locations)))
