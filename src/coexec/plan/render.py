"""The printer of a plan and its segments."""

from __future__ import annotations

from collections.abc import Iterator

from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import BasicBlock, Plan, SwitchCase, While
from coexec.plan.segments import Segment, Segments


def render_plan(plan: Plan, graph: TraceGraph, segments: Segments | None = None) -> str:
    """Returns one line per While, Switch-Case, block and, if given, segment; `A..B` are the node ids of a chain."""
    loops = f", {len(plan.loops)} loops" if plan.loops else ""
    lines = [f"plan of {len(plan.switch_cases)} Switch-Cases, {len(plan.blocks)} basic blocks{loops}"]
    for switch_case in plan.switch_cases:
        lines += [_while(loop, graph) for loop in plan.loops if loop.first_level == switch_case.level]
        lines.append(_switch_case(switch_case))
        for block in switch_case.cases:
            lines += _block(block, graph, segments)
    return "\n".join(lines)


def _while(loop: While, graph: TraceGraph) -> str:
    again = ", ".join(
        f"%{source} -> %{target}({graph.edge_visits[source, target]})" for source, target in loop.back_edges
    )
    return (
        f"  levels {loop.first_level} to {loop.last_level}: While {loop.id} over {again}; Loop Cond {_list(loop.conds)}"
    )


def _switch_case(switch_case: SwitchCase) -> str:
    if not switch_case.is_branch:
        return f"  level {switch_case.level}: always"
    selectors = ", ".join(f"%{node}" for node in switch_case.selectors)
    return f"  level {switch_case.level}: Case Select on {selectors}{' or no-op' if switch_case.may_skip else ''}"


def _block(block: BasicBlock, graph: TraceGraph, segments: Segments | None) -> Iterator[str]:
    visits = graph.nodes[block.nodes[0]].visits
    yield f"    block {block.id}: {_span(block.nodes)}, taken {visits} of {graph.traces}"
    if segments is not None:
        for index in segments.of_block[block.id]:
            yield f"      {_segment(segments.segments[index])}"


def _segment(segment: Segment) -> str:
    words = [f"segment {segment.id} {segment.kind}: {_span(segment.nodes)}"]
    words += [f"fetches {_list(segment.fetches)}"] if segment.fetches else []
    words += [f"fed at {_list(segment.feeds)}"] if segment.feeds else []
    if segment.copied_writes:
        words.append("copies " + ", ".join(f"%{node}[{position}]" for node, position in segment.copied_writes))
    words += ["not compiled"] if segment.kind != "python" and not segment.compile else []
    return "; ".join(words)


def _span(nodes: tuple[int, ...]) -> str:
    if len(nodes) == 1:
        return f"%{nodes[0]}"
    return f"%{nodes[0]}..%{nodes[-1]} ({len(nodes)} nodes)"


def _list(nodes: tuple[int, ...]) -> str:
    shown = ", ".join(f"%{node}" for node in nodes[:6])
    return shown + (f" and {len(nodes) - 6} more" if len(nodes) > 6 else "")
