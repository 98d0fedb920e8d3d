"""A merging algorithm written for clarity: full searches, no ranks, no indexes. The real one must agree with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from coexec.graph.tracegraph import END, START, Producer, node_key
from coexec.records import EXTERNAL, OpRecord, Trace

EXTERNAL_RANK = -1


@dataclass
class NaiveNode:
    key: object
    children: list[int] = field(default_factory=list)
    inputs: list[set[Producer]] = field(default_factory=list)
    uses: list[tuple[int, int, Producer]] = field(default_factory=list)  # (trace, input position, producer)
    numbers: list[tuple[str, ...]] = field(default_factory=list)  # spelled, one entry per visit


class NaiveGraph:
    """The TraceGraph by the book."""

    def __init__(self) -> None:
        self.nodes = [NaiveNode("start"), NaiveNode("end")]
        self.paths: list[list[int]] = []

    def reaches(self, start: int, goal: int) -> bool:
        found, todo = {start}, [start]
        while todo:
            for child in self.nodes[todo.pop()].children:
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return goal in found

    def find(self, pointer: int, op: OpRecord) -> int:
        key = node_key(op)
        for child in self.nodes[pointer].children:
            if self.nodes[child].key == key:
                return child
        for candidate, node in enumerate(self.nodes):
            if node.key == key and not self.reaches(candidate, pointer):
                return candidate
        self.nodes.append(NaiveNode(key, inputs=[set() for _ in op.inputs]))
        return len(self.nodes) - 1

    def merge(self, trace: Trace) -> list[int]:
        path: list[int] = []
        pointer = START
        for op in trace.ops:
            at = self.find(pointer, op)
            self.step(pointer, at)
            node = self.nodes[at]
            for position, ref in enumerate(op.inputs):
                producer = (EXTERNAL, 0) if ref.producer == EXTERNAL else (path[ref.producer], ref.output)
                node.inputs[position].add(producer)
                node.uses.append((len(self.paths), position, producer))
            node.numbers.append(tuple(repr(number) for number in op.numbers))
            path.append(at)
            pointer = at
        if trace.complete:
            self.step(pointer, END)
        self.paths.append(path)
        return path

    def step(self, parent: int, child: int) -> None:
        if child not in self.nodes[parent].children:
            self.nodes[parent].children.append(child)

    def fed(self, at: int) -> set[int]:
        seen = self.nodes[at].numbers
        return {position for position in range(len(seen[0])) if len({numbers[position] for numbers in seen}) > 1}

    def ambiguous(self, at: int) -> set[int]:
        """Input positions where the allowed producer passed last was not the answer in some trace."""
        node = self.nodes[at]
        return {
            position for number, position, used in node.uses if not self.is_last(number, node.inputs[position], used)
        }

    def is_last(self, number: int, allowed: set[Producer], used: Producer) -> bool:
        path = self.paths[number]
        rank = {
            producer: EXTERNAL_RANK if producer[0] == EXTERNAL else path.index(producer[0])
            for producer in allowed
            if producer[0] == EXTERNAL or producer[0] in path
        }
        return all(other == used or rank[other] < rank[used] for other in rank)


def trie_size(traces: list[Trace]) -> int:
    """Returns the number of nodes when traces share common prefixes only."""
    prefixes = set()
    for trace in traces:
        keys = [node_key(op) for op in trace.ops]
        prefixes |= {tuple(keys[: length + 1]) for length in range(len(keys))}
    return len(prefixes)
