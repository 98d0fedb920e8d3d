"""A merging algorithm written for clarity: full searches, no ranks, no indexes. The real one must agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coexec.graph.merge import LOOKAHEAD
from coexec.graph.tracegraph import END, START, Producer, node_key
from coexec.records import EXTERNAL, OpRecord, Trace

EXTERNAL_RANK = -1


@dataclass
class NaiveNode:
    key: object
    children: list[int] = field(default_factory=list)
    inputs: list[set[Producer]] = field(default_factory=list)
    uses: list[tuple[int, int, int, Producer, int]] = field(
        default_factory=list
    )  # (trace, index of the use, input position, producer, index of the producer)
    numbers: list[tuple[str, ...]] = field(default_factory=list)  # spelled, one entry per visit


class NaiveGraph:
    """The TraceGraph by the book."""

    def __init__(self) -> None:
        self.nodes = [NaiveNode("start"), NaiveNode("end")]
        self.paths: list[list[int]] = []
        self.back: set[tuple[int, int]] = set()

    def reaches(self, start: int, goal: int) -> bool:
        found, todo = {start}, [start]
        while todo:
            at = todo.pop()
            for child in self.nodes[at].children:
                if child not in found and (at, child) not in self.back:
                    found.add(child)
                    todo.append(child)
        return goal in found

    def child(self, at: int, key: object) -> int | None:
        return next((child for child in self.nodes[at].children if self.nodes[child].key == key), None)

    def goes_on(self, pointer: int, candidate: int, following: Sequence[OpRecord]) -> bool:
        """Whether no later op need become a new node only because the trace merges back with `candidate`."""
        at = candidate
        for op in following[:LOOKAHEAD]:
            if (child := self.child(at, node_key(op))) is not None:
                at = child
                continue
            same = [k for k, node in enumerate(self.nodes) if node.key == node_key(op) and not op.folded]
            ahead = [k for k in same if not self.reaches(k, pointer)]
            return not ahead or not all(self.reaches(k, at) for k in ahead)
        return True

    def find(self, pointer: int, op: OpRecord, following: Sequence[OpRecord]) -> int:
        key = node_key(op)
        if (child := self.child(pointer, key)) is not None:
            return child
        for candidate, node in enumerate(self.nodes):
            if node.key != key or (not op.folded and self.reaches(candidate, pointer)):
                continue
            if op.folded or self.goes_on(pointer, candidate, following):
                return candidate
        self.nodes.append(NaiveNode(key, inputs=[set() for _ in op.inputs]))
        return len(self.nodes) - 1

    def merge(self, trace: Trace) -> list[int]:
        path: list[int] = []
        pointer = START
        for index, op in enumerate(trace.ops):
            at = self.find(pointer, op, trace.ops[index + 1 :])
            self.step(pointer, at, op.folded)
            node = self.nodes[at]
            for position, ref in enumerate(op.inputs):
                producer = (EXTERNAL, 0) if ref.producer == EXTERNAL else (path[ref.producer], ref.output)
                node.inputs[position].add(producer)
                node.uses.append((len(self.paths), len(path), position, producer, ref.producer))
            node.numbers.append(tuple(repr(number) for number in op.numbers))
            path.append(at)
            pointer = at
        if trace.complete:
            self.step(pointer, END)
        self.paths.append(path)
        return path

    def step(self, parent: int, child: int, folded: bool = False) -> None:
        if child not in self.nodes[parent].children:
            if folded and self.reaches(child, parent):
                self.back.add((parent, child))
            self.nodes[parent].children.append(child)

    def fed(self, at: int) -> set[int]:
        seen = self.nodes[at].numbers
        return {position for position in range(len(seen[0])) if len({numbers[position] for numbers in seen}) > 1}

    def ambiguous(self, at: int) -> set[int]:
        """Input positions where the allowed producer passed last was not the answer in some trace."""
        node = self.nodes[at]
        return {
            position
            for number, at_index, position, used, used_index in node.uses
            if not self.is_last(self.paths[number][:at_index], node.inputs[position], used, used_index)
        }

    def older(self, at: int) -> set[int]:
        """Input positions that read a value although a later pass of its node had made another one."""
        return {
            position
            for number, at_index, position, used, used_index in self.nodes[at].uses
            if used[0] != EXTERNAL and used[0] in self.paths[number][used_index + 1 : at_index]
        }

    def is_last(self, passed: list[int], allowed: set[Producer], used: Producer, used_index: int) -> bool:
        last = {at: index for index, at in enumerate(passed)} | {EXTERNAL: EXTERNAL_RANK}
        if used[0] != EXTERNAL and last[used[0]] != used_index:
            return False
        return all(other == used or last[other[0]] < last[used[0]] for other in allowed if other[0] in last)

    def repeats(self) -> bool:
        """Whether some trace passed a node twice."""
        return any(len(set(path)) < len(path) for path in self.paths)


def trie_size(traces: list[Trace]) -> int:
    """Returns the number of nodes when traces share common prefixes only."""
    prefixes = set()
    for trace in traces:
        keys = [node_key(op) for op in trace.ops]
        prefixes |= {tuple(keys[: length + 1]) for length in range(len(keys))}
    return len(prefixes)
