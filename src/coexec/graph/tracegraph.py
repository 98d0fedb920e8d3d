"""The TraceGraph: all traces of a step, merged (Terra, section on TraceGraph generation).

A builder, not a record: `merge` is the only writer. Lists and dicts of ints, because a training step has 1,500 ops
and a merge happens between two iterations of the user's loop.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from coexec.records import EXTERNAL, OpKind, OpRecord

START = 0
"""Pseudo node before the first op of every trace."""

END = 1
"""Pseudo node after the last op of every complete trace."""

Producer = tuple[int, int]
"""(node id, output), or EXTERNAL_VALUE."""

Edge = tuple[int, int]
"""(from node id, to node id): `to` came directly after `from` in some trace.

A *back edge* leads to a folded node from which its source can be reached: a loop begins another pass. All others are
forward edges, and acyclic.
"""

EXTERNAL_VALUE: Producer = (EXTERNAL, 0)
"""The producer of every value from outside; which external it is, is decided anew in each iteration."""

WIDE_STRIDE = 1 << 40
"""Rank distance between neighbours of a trace that was added whole: room for branches in between."""

END_RANK = 1 << 128
"""Above every rank that is ever given."""

MAX_PATHS = 64
"""Distinct whole paths kept; a step that branches at random has too many to keep them all."""

NodeKey = tuple[
    int,  # uid: location, op and occurrence ordinal within the iteration (folded: location and op)
    tuple[Hashable, ...],  # static
    OpKind,
    tuple[int, ...],  # aliases
    tuple[int, ...],  # writes
    int,  # n_outputs
    int,  # number of inputs: alternatives are kept per position
    int,  # number of numbers: `fed` names positions
]
"""What makes two ops the same node, whatever their numbers are and whoever made their inputs."""


def node_key(op: OpRecord) -> NodeKey:
    """Returns the key that `op` has in the graph."""
    return (op.uid, op.static, op.kind, op.aliases, op.writes, op.n_outputs, len(op.inputs), len(op.numbers))


@dataclass(slots=True, eq=False)
class Node:
    """One op of the graph."""

    id: int  # dense; index in `TraceGraph.nodes`
    key: NodeKey
    op: str
    uid: int
    location: int
    kind: OpKind
    static: tuple[Hashable, ...]
    aliases: tuple[int, ...]  # per output: input position whose memory it shares, or -1; () if none does
    writes: tuple[int, ...]  # input positions whose memory the op writes
    random: bool
    n_outputs: int
    rank: int  # topological: smaller than every child's, but over back edges. Set by `order`
    stride: int  # rank distance to a child that continues the same chain. Set by `order`
    folded: bool  # an op of a loop whose trip count varies: a path may pass it several times
    inputs: list[set[Producer]]  # per position the producers seen: more than one is the data side of Case Select
    numbers: tuple[Hashable, ...] = ()  # as seen last
    spelling: str = "()"  # exact text of `numbers`: tells 1 from 1.0 from True and -0.0 from 0.0, equates nan
    fed: set[int] = field(default_factory=set)  # positions in `numbers` seen to vary: Input Feeding
    foreign: set[int] = field(default_factory=set)  # input positions where memory that others can write was seen
    ambiguous: set[int] = field(default_factory=set)  # input positions where the path does not decide which value it is
    children: list[int] = field(default_factory=list)  # in the order of discovery
    parents: list[int] = field(default_factory=list)
    visits: int = 0  # how often traces passed here; once per pass of a loop


@dataclass(slots=True)
class SeenPath:
    """A whole path that some trace took."""

    nodes: tuple[int, ...]  # without START and END
    complete: bool  # False: the step raised after the last node
    count: int


class TraceGraph:
    """All paths seen so far; acyclic but for back edges."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [_pseudo(START, "coexec::start", 0), _pseudo(END, "coexec::end", END_RANK)]
        self.by_key: dict[NodeKey, list[int]] = {}  # ids per key, oldest first; two when op order differs by path
        self.edge_visits: dict[Edge, int] = {}  # every edge, and how often traces took it
        self.back_edges: set[Edge] = set()  # those that begin another pass of a loop
        self.first_only: set[Edge] = set()  # those that the first trace took, and no other iteration; see `recurring`
        self.paths: dict[int, SeenPath] = {}  # by hash, at most MAX_PATHS
        self.traces = 0  # merged so far

    def add(self, op: OpRecord, key: NodeKey, rank: int, stride: int) -> Node:
        """Returns a new node for `op` without edges, inputs or numbers' history."""
        node = Node(
            len(self.nodes), key, op.op, op.uid, op.location, op.kind, op.static, op.aliases, op.writes, op.random,
            op.n_outputs, rank, stride, op.folded, [set() for _ in op.inputs], op.numbers, repr(op.numbers),
        )  # fmt: skip
        self.nodes.append(node)
        self.by_key.setdefault(key, []).append(node.id)
        return node

    def remember(self, path: tuple[int, ...], complete: bool) -> None:
        """Counts a whole path; the least travelled one is forgotten when there are more than MAX_PATHS."""
        digest = hash((complete, path))
        seen = self.paths.get(digest)
        if seen is not None:
            seen.count += 1
            return
        if len(self.paths) >= MAX_PATHS:
            del self.paths[min(self.paths, key=lambda known: self.paths[known].count)]
        self.paths[digest] = SeenPath(path, complete, 1)


def _pseudo(node_id: int, op: str, rank: int) -> Node:
    key: NodeKey = (node_id, (), OpKind.HOST, (), (), 0, 0, 0)
    return Node(node_id, key, op, node_id, 0, OpKind.HOST, (), (), (), False, 0, rank, WIDE_STRIDE, False, [])
