"""Where a basic block is cut into segments, and why: RULES, read from top to bottom.

A segment is executed as one graph that has all its inputs when it starts. A *functional* one may run before Python has
validated its ops, so it must change nothing that the outside sees. A *commit* one starts when Python has validated all
of it, and writes in place. A *python* one is a single op that Python runs itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from coexec.errors import InternalError
from coexec.graph.tracegraph import Node
from coexec.plan.memory import PYTHON_RUNS
from coexec.records import OpKind

Kind = Literal["functional", "commit", "python"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers in the rules; "ops" counts COMPUTE nodes."""

    small_write_bytes: int = 256 << 10  # a larger write to the outside's memory is never copied
    copied_bytes: int = 1 << 20  # all copies of one functional segment together
    near_ops: int = 8  # work that is too little to be worth a segment of its own beside a commit or a feed
    far_ops: int = 64  # work that is worth a segment of its own
    min_ops: int = 4  # a segment with fewer is not worth compiling

    def __post_init__(self) -> None:
        if self.far_ops < self.near_ops:  # a commit would end where the same number of ops makes it begin, for ever
            raise InternalError(f"Limits need far_ops >= near_ops, got {self.far_ops} < {self.near_ops}.")


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What the rules look at; lists are parallel to the nodes of one block."""

    nodes: list[Node]
    external: list[tuple[int, ...]]  # input positions through which the node writes the outside's memory
    largest_bytes: list[int]  # the largest of these writes
    total_bytes: list[int]  # all of them
    late: list[bool]  # needs a word from Python (`memory.needs_python`)
    apart: list[bool]  # no backend compiles it: it has a segment of its own, so that what is around it can be compiled
    to_write: list[float]  # ops from here to the next external write; inf if a FETCH or a python node comes first
    to_stop: list[float]  # ops from here to the next FETCH, python node or the end of the block


@dataclass(slots=True)
class OpenSegment:
    """The segment being filled."""

    kind: Kind
    start: int  # index in the block
    ops: int = 0  # COMPUTE nodes so far
    ops_at_late: int = 0  # `ops` when the latest late node was added
    has_late: bool = False
    has_fetch: bool = False
    has_foreign_write: bool = False
    is_apart: bool = False  # its one node cannot be compiled
    copied_bytes: int = 0
    members: set[int] = field(default_factory=set)  # node ids

    def add(self, facts: BlockFacts, index: int) -> None:
        """Appends the next node of the block."""
        node = facts.nodes[index]
        self.members.add(node.id)
        if facts.late[index]:
            self.has_late, self.ops_at_late = True, self.ops
        self.is_apart |= facts.apart[index]
        self.ops += node.kind == OpKind.COMPUTE
        self.has_fetch = self.has_fetch or node.kind == OpKind.FETCH
        self.has_foreign_write |= any(position in node.foreign for position in facts.external[index])
        self.copied_bytes += facts.total_bytes[index]


@dataclass(frozen=True, slots=True)
class Cut:
    """The open segment ends before `start`; one of kind `kind` begins there."""

    kind: Kind
    start: int


Rule = Callable[[BlockFacts, OpenSegment, int, Limits], Cut | None]


def first_cut(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Returns the cut that the first rule to apply wants before or at node `index`, or None."""
    rules = RULES
    if facts.nodes[index].kind == OpKind.HOST:  # Python executes it at once; graphs step over it
        rules = (python_has_run, foreign_write_ends_segment)
    return next((cut for rule in rules if (cut := rule(facts, segment, index, limits)) is not None), None)


def python_runs_it(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """SYNC and BARRIER: Python waits for all that came before, and then does it on real tensors."""
    if facts.nodes[index].kind not in PYTHON_RUNS or (segment.kind == "python" and not segment.members):
        return None
    return Cut("python", index)


def python_has_run(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """A python segment is one op."""
    return Cut("functional", index) if segment.kind == "python" and segment.members else None


def stands_apart(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """What no backend compiles is replayed, alone."""
    alone = facts.apart[index] or segment.is_apart
    return Cut(segment.kind, index) if alone and segment.members else None


def fetch_ends_commit(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Python waits at a FETCH and would never validate what follows: a commit segment holding one would not start."""
    if segment.kind != "commit" or facts.nodes[index].kind != OpKind.FETCH:
        return None
    return Cut("functional", index)


def foreign_write_ends_segment(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Python waits behind a write to memory that other code can see (NumPy's), so what follows is not validated.

    A segment that went on would never count: all of it has to be validated while Python waits for one of its ops.
    """
    return Cut("functional", index) if segment.has_foreign_write else None


def commit_ends_when_writes_end(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Much work without a write follows (the other half of a GAN's step): it need not wait for Python."""
    quiet_ops = min(facts.to_write[index], facts.to_stop[index])
    return Cut("functional", index) if segment.kind == "commit" and quiet_ops > limits.far_ops else None


def large_write_commits(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """A write too large to copy is done in place once Python validated it; the optimizer at the end costs no copy."""
    if segment.kind != "functional" or not facts.external[index]:
        return None
    too_large = facts.largest_bytes[index] > limits.small_write_bytes
    too_many = segment.copied_bytes + facts.total_bytes[index] > limits.copied_bytes
    return Cut("commit", _commit_start(facts, segment, index, limits)) if too_large or too_many else None


def fed_write_commits(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """A learning rate: the graph needs it at its start and Python has it last, so all before would wait for it.

    Python is then about to validate the writes as well, and they need no copies. Known weakness: a number that varies
    just before a chain of small writes in the forward pass (BatchNorm) makes that chain wait for Python, too.
    """
    if segment.kind != "functional" or not facts.nodes[index].fed or facts.to_write[index] > limits.near_ops:
        return None
    return Cut("commit", _commit_start(facts, segment, index, limits))


def choice_is_made_outside(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Python picks one of several values: a graph is handed the choice as an input, so it cannot also make it."""
    node = facts.nodes[index]
    if not any(source in segment.members for position in node.ambiguous for source, _ in node.inputs[position]):
        return None
    return Cut(segment.kind, index)


def late_feed_follows_fetch(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """The graph would wait at its start for what Python supplies after the FETCH, and Python for the graph."""
    if segment.kind != "functional" or not (segment.has_fetch and facts.late[index]):
        return None
    return Cut("functional", index)


def work_precedes_late_feed(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> Cut | None:
    """Enough work to be worth a start before Python supplies a value.

    The first number that varies may be far from Python's present place, so little work is enough; after that, and for
    other late values (a NumPy batch is mostly there already), fusion is worth more than a short wait.
    """
    if segment.kind != "functional" or not facts.late[index]:
        return None
    first_fed = bool(facts.nodes[index].fed) and not segment.has_late
    enough_ops = limits.near_ops if first_fed else limits.far_ops
    return Cut("functional", index) if segment.ops - segment.ops_at_late > enough_ops else None


RULES: tuple[Rule, ...] = (
    python_runs_it,
    python_has_run,
    stands_apart,
    fetch_ends_commit,
    foreign_write_ends_segment,
    commit_ends_when_writes_end,
    large_write_commits,
    fed_write_commits,
    choice_is_made_outside,
    late_feed_follows_fetch,
    work_precedes_late_feed,
)
"""Asked in this order, and again after each cut until none applies; each one's cut makes its own condition false."""


def _commit_start(facts: BlockFacts, segment: OpenSegment, index: int, limits: Limits) -> int:
    """Returns where the commit segment begins that node `index` asks for: here, or a little earlier.

    Little work before it is not worth a segment. A bias of a few bytes before the first large weight belongs to the
    same optimizer. A FETCH before it stays outside (`fetch_ends_commit`).
    """
    if segment.ops <= limits.near_ops and not segment.has_fetch:
        return segment.start
    first, ops = index, 0
    for before in range(index - 1, segment.start - 1, -1):
        ops += facts.nodes[before].kind == OpKind.COMPUTE
        if ops > limits.near_ops or facts.nodes[before].kind == OpKind.FETCH:
            break
        if facts.external[before]:
            first = before
    return first


def distances(nodes: list[Node], external: list[tuple[int, ...]]) -> tuple[list[float], list[float]]:
    """Returns `to_write` and `to_stop` of BlockFacts, in one pass from the block's end."""
    to_write, to_stop = [math.inf] * len(nodes), [0.0] * len(nodes)
    write, stop = math.inf, 0.0
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.kind == OpKind.FETCH or node.kind in PYTHON_RUNS:
            write, stop = math.inf, 0.0
        elif external[index]:
            write, stop = 0.0, stop + (node.kind == OpKind.COMPUTE)
        elif node.kind == OpKind.COMPUTE:
            write, stop = write + 1, stop + 1
        to_write[index], to_stop[index] = write, stop
    return to_write, to_stop
