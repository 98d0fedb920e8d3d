"""`step.explain()`: why a step is in its phase, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coexec.config import disabled
from coexec.intercept.native import native_error
from coexec.runtime.history import counted, times
from coexec.runtime.policy import FOR_GOOD, Phase
from coexec.runtime.stats import StepStats

if TYPE_CHECKING:
    from coexec.runtime.step_runner import StepRunner

PLACES = 10
"""Lines shown per list; the counts are of all."""


def explain(runner: StepRunner) -> str:
    """Returns the story of a step: its phase and why, calls, fallbacks and waits with the user's lines, executors."""
    stats = runner.stats()
    lines = [f"step {runner.name}: {stats.phase}{_because(runner, stats)}", f"  {_calls(stats)}"]
    if runner.benefit.verdict:
        lines.append(f"  is it worth it? {runner.benefit.verdict}")
    elif runner.waiting.latest is not None and not runner.rests():
        lines.append(f"  is it worth it? When this was last measured, {runner.waiting.latest}")
    lines += _fallbacks(runner, stats)
    lines += _new_paths(runner, stats)
    lines += _graph(runner, stats)
    lines += _waits(runner, stats)
    return "\n".join(lines)


def _because(runner: StepRunner, stats: StepStats) -> str:
    """Why the next call is what it is; '' for co-execution, which needs no reason."""
    if disabled():
        return ", because COEXEC_DISABLE turns coexec off (calls meanwhile are not counted)"
    if (error := native_error()) is not None:
        return f", because there is no native core: {error}"
    if runner.options.mode == "eager":
        return ", because of mode='eager'"
    if runner.rests():
        return f": it {runner.waiting}"
    if stats.phase == Phase.EAGER.value:
        return f", because {runner.policy.reason}{_again(runner.policy.rest)}"
    return _WORDS.get(stats.phase, "")


_WORDS = {
    Phase.BUILDING.value: ": the native core is being built; calls run as plain eager until it is there",
    Phase.TRACING.value: ": calls run as plain eager and are recorded, until one brings nothing new",
}


def _again(rest: int) -> str:
    return "; not tried again" if rest > FOR_GOOD // 2 else f"; co-execution is tried again after {rest} calls"


def _calls(stats: StepStats) -> str:
    left = sum(stats.fallbacks.values())
    plain = stats.iterations - stats.traced - stats.co_executed - left
    text = (
        f"{counted(stats.iterations, 'call')}: {stats.traced} traced, {stats.co_executed} co-executed, {left} fell back"
    )
    return text + (f", {plain} plain eager" if plain > 0 else "")


def _fallbacks(runner: StepRunner, stats: StepStats) -> Iterator[str]:
    """A fallback: the call began in co-execution, and was finished as a traced one with eager's results."""
    for reason, count in sorted(stats.fallbacks.items(), key=lambda item: -item[1]):
        yield f"  fell back: {reason}: {times(count)}"
    events = list(runner.history.fallbacks)
    yield from (f"    {event}" for event in events[-PLACES:])
    if len(events) > PLACES:
        yield f"    (the last {PLACES})"


def _new_paths(runner: StepRunner, stats: StepStats) -> Iterator[str]:
    """Where a step that does not settle keeps doing what it has not done before."""
    if stats.phase == Phase.CO_EXECUTION.value or runner.rests() or not runner.history.new_paths:
        return
    yield "  what was new, by the place where a call first did something that the graph did not know:"
    for place, count in runner.history.new_paths.most_common(PLACES):
        yield f"    {place}: {times(count)}"


def _graph(runner: StepRunner, stats: StepStats) -> Iterator[str]:
    operations = max(0, len(runner.graph.nodes) - 2)  # without its start and its end
    if not operations:
        return
    executors = ", ".join(f"{count} run by {name}" for name, count in stats.segments.items())
    segments = f"{counted(sum(stats.segments.values()), 'segment')}: {executors}"
    yield (
        f"  graph: {counted(operations, 'operation')}, {counted(stats.switches, 'branch', 'branches')}, "
        f"{counted(stats.loops, 'loop')}; {segments if executors else 'not yet divided into segments'}; "
        f"{counted(stats.fetches, 'value')} of the graph read by Python, {stats.feeds} handed in"
    )
    yield from (f"    {text}" for text in runner.segments.describe())
    yield from (f"    {text}" for text in runner.loop_lines())
    yield from (f"    the graph waited: {why}: {times(count)}" for why, count in runner.graph_waits().items() if count)


def _waits(runner: StepRunner, stats: StepStats) -> Iterator[str]:
    waits = runner.waits()
    if not waits:
        return
    count = sum(wait.count for wait in waits)
    yield f"  Python waited for the graph {times(count)}, {stats.python_stall_s:.3f} s in all:"
    yield from (f"    {wait}" for wait in waits[:PLACES])
    if len(waits) > PLACES:
        yield f"    and at {len(waits) - PLACES} other places"
