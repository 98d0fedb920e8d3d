"""PythonRunner and GraphRunner in miniature: do they ever wait for each other, and who sees which write?

Written from the meaning of the segment kinds, not from the rules that cut them.
"""

from __future__ import annotations

from coexec.graph.tracegraph import Node, Producer, TraceGraph
from coexec.plan.cases import Plan
from coexec.plan.segments import Segment, Segments
from coexec.records import EXTERNAL, OpKind


class DeadlockError(Exception):
    """Neither runner can go on."""


class Runners:
    """One iteration along one path."""

    def __init__(self, graph: TraceGraph, plan: Plan, segments: Segments, path: tuple[int, ...]) -> None:
        self.graph = graph
        self.path = [graph.nodes[node] for node in path]
        self.index = {node: at for at, node in enumerate(path)}
        blocks = dict.fromkeys(plan.block_of[node] for node in path)
        self.todo = [segments.segments[number] for block in blocks for number in segments.of_block[block]]
        self.segment_of = segments.segment_of
        self.validated = 0  # nodes that Python has passed
        self.finished: set[int] = set()  # segments that have run

    def run(self) -> None:
        """Runs to the end, or raises DeadlockError."""
        while self.validated < len(self.path) or self.todo:
            if not (self.python_moves() or self.graph_moves()):
                raise DeadlockError(f"Python is at {self.path[self.validated :][:1]}, the graph at {self.todo[:1]}")

    def python_moves(self) -> bool:
        if self.validated == len(self.path):
            return False
        node = self.path[self.validated]
        if node.kind == OpKind.FETCH and self.segment_of[node.id] not in self.finished:
            return False
        if node.kind in (OpKind.SYNC, OpKind.BARRIER) and self.todo[0].nodes[0] != node.id:
            return False
        if self.validated and not self.may_pass(self.path[self.validated - 1]):
            return False
        self.validated += 1
        return True

    def may_pass(self, node: Node) -> bool:
        """Behind a write that other code can see, Python waits for it."""
        return not self.is_seen_at_once(node) or self.segment_of[node.id] in self.finished

    def is_seen_at_once(self, node: Node) -> bool:
        return bool(node.foreign & writes_outside(self.graph, node))

    def graph_moves(self) -> bool:
        if not self.todo or not self.may_start(self.todo[0]):
            return False
        self.finished.add(self.todo.pop(0).id)
        return True

    def may_start(self, segment: Segment) -> bool:
        if segment.kind == "functional" and not any(map(self.is_seen_at_once, self.nodes_of(segment))):
            # Python hands over what belongs to an op when it gets there, and only then waits if that is a FETCH.
            return all(self.validated >= self.index[node] for node in segment.nodes if self.has_late_input(node))
        # What is written must have been validated: for good in a commit segment, at once where other code sees it.
        return self.validated > self.index[segment.nodes[-1]]

    def nodes_of(self, segment: Segment) -> list[Node]:
        return [self.graph.nodes[node] for node in segment.nodes]

    def has_late_input(self, node_id: int) -> bool:
        node = self.graph.nodes[node_id]
        made_by_host = {
            source
            for allowed in node.inputs
            for source, _ in allowed
            if source != EXTERNAL and self.graph.nodes[source].kind == OpKind.HOST
        }
        late = bool(node.fed or node.foreign or node.ambiguous or made_by_host or node.op == "aten::lift_fresh")
        return late and node.kind != OpKind.HOST


def writes_outside(graph: TraceGraph, node: Node) -> set[int]:
    """Returns the input positions through which a node writes memory of the outside, by plain recursion."""
    python_does = (OpKind.HOST, OpKind.SYNC, OpKind.BARRIER)
    if node.kind in python_does:
        return set()
    return {position for position in node.writes if any(_outside(graph, value) for value in node.inputs[position])}


def _outside(graph: TraceGraph, value: Producer) -> bool:
    if value[0] == EXTERNAL:
        return True
    node = graph.nodes[value[0]]
    root = node.aliases[value[1]] if node.aliases else -1
    if root < 0:
        return node.kind in (OpKind.HOST, OpKind.SYNC, OpKind.BARRIER)
    return any(_outside(graph, source) for source in node.inputs[root])
