"""`step.explain()`: why a step is in its phase, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coexec.intercept.native import native_error

if TYPE_CHECKING:
    from coexec.runtime.step_runner import StepRunner


def explain(runner: StepRunner) -> str:
    """Returns the story of a step: phase, counts, fallbacks with places, executors."""
    stats = runner.stats()
    lines = [
        f"step {runner.name}: {stats.phase}",
        f"  {stats.iterations} iterations: {stats.traced} traced, {stats.co_executed} co-executed, "
        f"{sum(stats.fallbacks.values())} fallbacks",
    ]
    if runner.benefit.verdict:
        lines.append(f"  worth it? {runner.benefit.verdict}")
    if (error := native_error()) is not None:
        lines.append(f"  no native core: {error}")
    for reason, count in sorted(stats.fallbacks.items(), key=lambda item: -item[1]):
        lines.append(f"  fallback: {reason}: {count}")
    for event in runner.history.fallbacks:
        lines.append(f"    {event}")
    lines.append(
        f"  graph: {len(runner.graph.nodes)} nodes, {stats.switches} switches, {stats.loops} loops, "
        f"segments {stats.segments or 'none'}, {stats.fetches} fetches, {stats.feeds} feeds"
    )
    lines += [f"    {text}" for text in runner.segments.describe()]
    lines += [f"    {text}" for text in runner.loop_lines()]
    lines += [f"  the graph waited: {why}: {count}" for why, count in runner.graph_waits().items() if count]
    lines += [f"  Python waited: {why}: {count}" for why, count in runner.waits().items() if count]
    return "\n".join(lines)
