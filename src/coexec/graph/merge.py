"""Merging a trace into the TraceGraph (Terra, section on TraceGraph generation).

A pointer stands on the latest matched node. The next op is looked for among its children, then among all nodes with an
equal key that can follow without a cycle (the branch merges back), and becomes a new node otherwise. When two traces
run the same ops in different order, one key has two nodes; children first keeps later traces on the right one. A branch
that would soon have to go back does not merge: ops that come now here, now there (stochastic downsampling) are nodes at
each place, where one node for all would make new nodes of all ops between two places.

A folded op, of a loop whose trip count varies, has one node: where it cannot follow without a cycle, it begins another
pass, and the edge to it is a back edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from coexec.errors import InternalError
from coexec.graph.order import closes_cycle, link, link_back, next_place
from coexec.graph.select import RememberedPaths, passed_last
from coexec.graph.tracegraph import END, EXTERNAL_VALUE, START, Edge, Node, NodeKey, Producer, TraceGraph, node_key
from coexec.records import EXTERNAL, OpRecord, Trace, ValueRef

LOOKAHEAD = 64
"""Ops of the trace that are looked at before it merges back: a stretch that is drawn is seldom longer."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What a trace added to the graph."""

    nodes: tuple[int, ...]  # node id per op of the trace
    new_nodes: tuple[tuple[int, int], ...]  # (node id, index of the op that made it)
    new_edges: tuple[Edge, ...]
    new_inputs: tuple[tuple[int, int, Producer], ...]  # (node id, input position, producer), those of new nodes too
    new_fed: tuple[tuple[int, int], ...]  # (node id, position in `numbers`) seen to vary for the first time
    new_foreign: tuple[tuple[int, int], ...]  # (node id, input position) first seen in memory that others can write
    new_ambiguous: tuple[tuple[int, int], ...]  # (node id, input position) that paths were found not to decide

    @property
    def covered(self) -> bool:
        """True if the graph already knew the whole trace: tracing may end."""
        return not (
            self.new_nodes
            or self.new_edges
            or self.new_inputs
            or self.new_fed
            or self.new_foreign
            or self.new_ambiguous
        )

    @property
    def share_new(self) -> float:
        """How much of the trace was new: ops that came over new edges, as all new nodes do, by all its ops."""
        return len(self.new_edges) / max(1, len(self.nodes))


def merge(graph: TraceGraph, trace: Trace) -> MergeResult:
    """Merges `trace` into `graph`.

    An incomplete trace (the step raised) gets no edge to END. Time is linear in the trace for a covered one; about
    5 us per op covered, 10 us new.

    Raises:
        InternalError: an op is marked as matched with a node that it cannot be.
    """
    return _Merger(graph, trace).run()


def first_news(result: MergeResult) -> int | None:
    """Returns the node of the earliest op of the trace that brought something new; None if only its end did."""
    news = {node for node, _ in (*result.new_nodes, *result.new_fed, *result.new_foreign, *result.new_ambiguous)}
    news |= {node for _, node in result.new_edges} | {node for node, _, _ in result.new_inputs}
    return next((node for node in result.nodes if node in news), None)


class _Merger:
    """One merge."""

    def __init__(self, graph: TraceGraph, trace: Trace) -> None:
        self.graph = graph
        self.trace = trace
        self.foreign = [external.foreign for external in trace.externals]
        self.pointer = graph.nodes[START]  # the latest matched node
        self.path: list[int] = []
        self.passed: dict[int, int] = {}  # index in `path` per node, of several the last
        self.remembered = RememberedPaths(graph)
        self.behind: set[int] = {START}  # nodes known to reach the pointer, see closes_cycle
        self.new_nodes: list[tuple[int, int]] = []
        self.new_edges: list[Edge] = []
        self.new_inputs: list[tuple[int, int, Producer]] = []
        self.new_fed: list[tuple[int, int]] = []
        self.new_foreign: list[tuple[int, int]] = []
        self.new_ambiguous: list[tuple[int, int]] = []

    def run(self) -> MergeResult:
        for index, op in enumerate(self.trace.ops):
            node = self._node_of(index, op)
            self._take_edge(node)
            if op.node < 0:  # of a prefix op the runner, which validated it against the node, reports no more
                self._merge_inputs(node, op.inputs)
                if op.numbers:
                    self._merge_numbers(node, op)
            self._advance(node)
        return self._finish()

    def _node_of(self, index: int, op: OpRecord) -> Node:
        """Finds or makes the node of an op, nearest first."""
        if op.node >= 0:
            return self._validated(index, op)
        key = node_key(op)
        return self._child(self.pointer, key) or self._merge_back(index, key) or self._branch(index, op, key)

    def _validated(self, index: int, op: OpRecord) -> Node:
        """The runner matched this op before the fallback; only an edge may be missing."""
        nodes = self.graph.nodes
        if op.node >= len(nodes) or nodes[op.node].uid != op.uid:
            raise InternalError(f"Op {index} ({op.op}) is marked as node {op.node}, which is another op or none.")
        edge_known = (self.pointer.id, op.node) in self.graph.edge_visits
        if not (edge_known or op.folded) and closes_cycle(self.graph, self.pointer.id, op.node, self.behind):
            raise InternalError(
                f"Op {index} ({op.op}) is marked as node {op.node}, which comes before its predecessor."
            )
        return nodes[op.node]

    def _child(self, node: Node, key: NodeKey) -> Node | None:
        nodes = self.graph.nodes
        for child in node.children:
            if nodes[child].key == key:
                return nodes[child]
        return None

    def _merge_back(self, index: int, key: NodeKey) -> Node | None:
        nodes = self.graph.nodes
        for candidate in self.graph.by_key.get(key, ()):
            if nodes[candidate].folded:
                return nodes[candidate]
            if closes_cycle(self.graph, self.pointer.id, candidate, self.behind):
                continue
            if self._goes_on(nodes[candidate], index + 1):
                return nodes[candidate]
        return None

    def _goes_on(self, node: Node, index: int) -> bool:
        """False if the trace, after a few ops that follow `node`, goes on with one that lies before them in the graph.

        With new nodes for these few, it could go on with that op.
        """
        for op in self.trace.ops[index : index + LOOKAHEAD]:
            key = node_key(op)
            child = self._child(node, key)
            if child is None:
                return self._can_follow(node, key)
            node = child
        return True

    def _can_follow(self, node: Node, key: NodeKey) -> bool:
        """False if all nodes with the key that can come after the pointer come before `node`."""
        graph, at = self.graph, self.pointer.id
        known = [k for k in graph.by_key.get(key, ()) if not graph.nodes[k].folded]
        ahead = [k for k in known if not closes_cycle(graph, at, k, self.behind)]
        return not ahead or any(not closes_cycle(graph, node.id, k, set()) for k in ahead)

    def _branch(self, index: int, op: OpRecord, key: NodeKey) -> Node:
        node = self.graph.add(op, key, *next_place(self.pointer))
        self.new_nodes.append((node.id, index))
        return node

    def _take_edge(self, node: Node) -> None:
        edge = (self.pointer.id, node.id)
        visits = self.graph.edge_visits
        seen = visits.get(edge)
        if seen is None:
            closes = node.folded and closes_cycle(self.graph, *edge, self.behind)
            (link_back if closes else link)(self.graph, *edge)
            self.new_edges.append(edge)
            seen = 0
        visits[edge] = seen + 1
        if self.graph.traces == 0:
            self.graph.first_only.add(edge)
        elif self.graph.first_only:
            self.graph.first_only.discard(edge)
        if edge in self.graph.back_edges:  # what was passed so far may lie ahead again
            self.behind = {START}

    def _merge_inputs(self, node: Node, inputs: tuple[ValueRef, ...]) -> None:
        """Adds the producers of this trace to the allowed ones."""
        path = self.path
        for position, ref in enumerate(inputs):
            of_older_pass = False
            if ref.producer == EXTERNAL:
                value = EXTERNAL_VALUE
                if ref.output >= 0 and self.foreign[ref.output] and position not in node.foreign:
                    node.foreign.add(position)
                    self.new_foreign.append((node.id, position))
            else:
                value = (path[ref.producer], ref.output)
                of_older_pass = self.passed[value[0]] != ref.producer
            allowed = node.inputs[position]
            added = value not in allowed
            if added:
                allowed.add(value)
                self.new_inputs.append((node.id, position, value))
            if of_older_pass or (len(allowed) > 1 and self._is_undecided(node, position, value, added)):
                self._mark_ambiguous(node, position)

    def _is_undecided(self, node: Node, position: int, value: Producer, added: bool) -> bool:
        """True if the path does not decide which producer it is, on this trace or on a remembered one."""
        if position in node.ambiguous:
            return True
        expected = passed_last(node.inputs[position], self.passed)
        return expected != value or (added and self.remembered.contradict(node, position, value))

    def _mark_ambiguous(self, node: Node, position: int) -> None:
        if position not in node.ambiguous:
            node.ambiguous.add(position)
            self.new_ambiguous.append((node.id, position))

    def _merge_numbers(self, node: Node, op: OpRecord) -> None:
        """Marks the numbers that differ from the latest trace's, in value, type or tuple length, as fed."""
        spelling = repr(op.numbers)
        if spelling == node.spelling:
            return
        for position, (old, new) in enumerate(zip(node.numbers, op.numbers, strict=True)):
            if position not in node.fed and repr(old) != repr(new):
                node.fed.add(position)
                self.new_fed.append((node.id, position))
        node.numbers, node.spelling = op.numbers, spelling

    def _advance(self, node: Node) -> None:
        node.visits += 1
        self.passed[node.id] = len(self.path)
        self.path.append(node.id)
        self.behind.add(node.id)
        self.pointer = node

    def _finish(self) -> MergeResult:
        nodes = self.graph.nodes
        nodes[START].visits += 1
        if self.trace.complete:
            self._take_edge(nodes[END])
            nodes[END].visits += 1
        self.graph.traces += 1
        path = tuple(self.path)
        self.graph.remember(path, self.trace.complete)
        return MergeResult(
            path, tuple(self.new_nodes), tuple(self.new_edges), tuple(self.new_inputs), tuple(self.new_fed),
            tuple(self.new_foreign), tuple(self.new_ambiguous),
        )  # fmt: skip
