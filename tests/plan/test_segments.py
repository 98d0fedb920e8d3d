"""Cutting blocks into segments: steps by hand, and random programs run by two runners in miniature."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coexec.errors import InternalError
from coexec.graph.merge import merge
from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import Plan, assign_cases
from coexec.plan.check import check_plan, check_segments
from coexec.plan.rules import Limits
from coexec.plan.segments import BytesOf, Segments, cut_segments
from coexec.records import EXTERNAL, ExternalRecord, OpKind, OpRecord, Trace, ValueRef
from tests.graph.programs import PROGRAMS, Program, run
from tests.plan.runners import DeadlockError, Runners, writes_outside

SMALL, LARGE = 1 << 10, 1 << 20


class Step:
    """A trace written op by op: parameters are externals, values are ValueRefs."""

    def __init__(self) -> None:
        self.ops: list[OpRecord] = []
        self.externals = [ExternalRecord(0, SMALL)]

    def external(self, foreign: bool = False) -> ValueRef:
        self.externals.append(ExternalRecord(len(self.externals), SMALL, foreign=foreign))
        return ValueRef(EXTERNAL, len(self.externals) - 1)

    def op(self, name: str, *inputs: ValueRef, number: float = 1.0, kind: OpKind = OpKind.COMPUTE) -> ValueRef:
        return self._add(OpRecord(name, len(self.ops), 0, kind, (), (number,), inputs, 1))

    def write(self, name: str, *inputs: ValueRef, number: float = 1.0) -> ValueRef:
        """An in-place op on its first input, which the output aliases."""
        uid = len(self.ops)
        return self._add(OpRecord(name, uid, 0, OpKind.COMPUTE, (), (number,), inputs, 1, writes=(0,), aliases=(0,)))

    def view(self, value: ValueRef) -> ValueRef:
        return self._add(OpRecord("view", len(self.ops), 0, OpKind.VIEW, (), (), (value,), 1, aliases=(0,)))

    def fetch(self, value: ValueRef) -> None:
        self._add(OpRecord("item", len(self.ops), 0, OpKind.FETCH, (), (), (value,), 0))

    def python(self, kind: OpKind, *inputs: ValueRef) -> ValueRef:
        return self._add(OpRecord(kind.name, len(self.ops), 0, kind, (), (), inputs, 1))

    def work(self, count: int, start: ValueRef | None = None) -> ValueRef:
        """A chain of COMPUTE ops."""
        value = start if start is not None else ValueRef(EXTERNAL, 0)
        for _ in range(count):
            value = self.op("work", value)
        return value

    def trace(self) -> Trace:
        return Trace(tuple(self.ops), tuple(self.externals))

    def _add(self, record: OpRecord) -> ValueRef:
        self.ops.append(record)
        return ValueRef(len(self.ops) - 1, 0)


def by_name(graph: TraceGraph) -> BytesOf:
    """Sizes of writes by the names of ops: "big..." writes 1 MiB."""
    return lambda node, position: LARGE if graph.nodes[node].op.startswith("big") else SMALL


def cut(*steps: Step) -> tuple[TraceGraph, Plan, Segments]:
    graph = TraceGraph()
    paths = [merge(graph, step.trace()).nodes for step in steps]
    plan = assign_cases(graph)
    check_plan(plan, graph)
    segments = cut_segments(graph, plan, by_name(graph))
    check_segments(segments, plan, graph, by_name(graph))
    for path in paths:
        Runners(graph, plan, segments, path).run()
    return graph, plan, segments


def shape(segments: Segments) -> list[tuple[str, int]]:
    """Returns (kind, number of nodes) per segment."""
    return [(segment.kind, len(segment.nodes)) for segment in segments.segments]


def training_step(lr: float, *, params: int = 3, write: str = "big_sub_", log: bool = True, work: int = 20) -> Step:
    """Forward and backward, then SGD with weight decay, then `loss.item()`."""
    step = Step()
    weights = [step.external() for _ in range(params)]
    loss = step.work(work)
    for weight in weights:
        update = step.op("mul", step.op("add", loss, weight), number=lr)
        step.write(write, weight, update)
    if log:
        step.fetch(loss)
    return step


def test_a_step_without_effects_is_one_functional_segment() -> None:
    step = Step()
    step.fetch(step.view(step.work(10)))
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 12)]
    assert segments.segments[0].fetches == (13,)
    assert segments.segments[0].compile


def test_the_optimizer_commits_in_place_and_the_log_comes_after() -> None:
    _, _, segments = cut(training_step(0.1))
    assert shape(segments) == [("functional", 22), ("commit", 7), ("functional", 1)]
    assert all(segment.copied_writes == () for segment in segments.segments)
    assert [segment.compile for segment in segments.segments] == [True, True, False]


def test_a_learning_rate_that_varies_does_not_hold_up_the_backward_pass() -> None:
    for write in ("big_sub_", "sub_"):
        _, _, segments = cut(training_step(0.1, write=write), training_step(0.2, write=write))
        assert shape(segments) == [("functional", 21), ("commit", 8), ("functional", 1)]
        assert segments.segments[0].feeds == ()
        assert segments.segments[1].copied_writes == ()


def test_small_writes_without_a_varying_number_are_copied_and_nothing_is_cut() -> None:
    graph, _, segments = cut(training_step(0.1, write="sub_", log=False))
    assert shape(segments) == [("functional", 29)]
    assert [graph.nodes[node].op for node, _ in segments.segments[0].copied_writes] == ["sub_"] * 3


def test_running_statistics_are_copied_before_the_large_writes() -> None:
    step = Step()
    statistics, weight = step.external(), step.external()
    value = step.work(10)
    step.write("batch_norm", statistics, value)
    step.write("big_sub_", weight, step.work(20, value))
    graph, _, segments = cut(step)
    assert shape(segments) == [("functional", 31), ("commit", 1)]
    assert [graph.nodes[node].op for node, _ in segments.segments[0].copied_writes] == ["batch_norm"]


def test_a_small_bias_right_before_the_first_large_weight_belongs_to_the_optimizer() -> None:
    step = Step()
    bias, weight = step.external(), step.external()
    gradient = step.work(20)
    step.write("sub_", bias, gradient)
    step.write("big_sub_", weight, gradient)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 20), ("commit", 2)]


def test_many_small_writes_stop_being_copied_at_the_limit() -> None:
    step = Step()
    weights = [step.external() for _ in range(10)]
    value = step.work(10)
    for weight in weights:
        value = step.work(10, value)
        step.write("add_", weight, value)
    graph, plan = TraceGraph(), Plan((), (), (), ())
    merge(graph, step.trace())
    plan = assign_cases(graph)
    segments = cut_segments(graph, plan, lambda node, position: 200 << 10)
    check_segments(segments, plan, graph, lambda node, position: 200 << 10)
    assert [segment.kind for segment in segments.segments] == ["functional", "commit"]
    assert len(segments.segments[0].copied_writes) == 5


def test_a_write_through_views_and_in_place_results_is_external_too() -> None:
    step = Step()
    weight = step.external()
    gradient = step.work(20)
    fresh = step.write("big_add_", gradient, gradient)
    first = step.write("big_mul_", step.view(weight), fresh)
    step.write("big_add_", first, gradient)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 22), ("commit", 2)]


def test_a_write_to_what_python_already_holds_is_external() -> None:
    step = Step()
    picked = step.python(OpKind.SYNC, step.work(10))
    step.write("big_add_", picked, step.work(10))
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 10), ("python", 1), ("functional", 10), ("commit", 1)]


def test_sync_and_barrier_are_segments_of_python() -> None:
    step = Step()
    value = step.work(5)
    step.python(OpKind.BARRIER)
    step.python(OpKind.SYNC, value)
    step.work(5)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 5), ("python", 1), ("python", 1), ("functional", 5)]
    assert [segment.compile for segment in segments.segments] == [True, False, False, True]


def test_views_and_host_ops_do_not_cut_and_are_no_work() -> None:
    step = Step()
    value = step.view(step.work(2))
    step.python(OpKind.HOST)
    step.work(1, value)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 5)]
    assert not segments.segments[0].compile


def test_a_host_op_after_a_sync_is_not_in_its_segment() -> None:
    step = Step()
    step.python(OpKind.SYNC, step.work(5))
    step.python(OpKind.HOST)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 5), ("python", 1), ("functional", 1)]


def test_a_host_write_is_done_by_python() -> None:
    counter = Step()
    record = dataclasses.replace(counter.external(), producer=EXTERNAL)
    counter.work(10)
    counter.ops.append(OpRecord("big_add_", 99, 0, OpKind.HOST, (), (), (record,), 1, writes=(0,), aliases=(0,)))
    _, _, segments = cut(counter)
    assert shape(segments) == [("functional", 11)]


def test_a_fetch_ends_a_commit_segment() -> None:
    step = Step()
    first, second = step.external(), step.external()
    gradient = step.work(20)
    written = step.write("big_sub_", first, gradient)
    step.fetch(written)
    step.write("big_sub_", second, step.work(2, gradient))
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 20), ("commit", 1), ("functional", 3), ("commit", 1)]


@pytest.mark.parametrize("size", ["", "big_"])
def test_a_write_that_other_code_can_see_ends_its_segment(size: str) -> None:
    """Python waits behind it: a segment that went on would be discarded in every iteration."""
    step = Step()
    weight, scratch = step.external(), step.external(foreign=True)
    gradient = step.work(20)
    step.write(f"{size}sub_", weight, gradient)
    step.write("add_", scratch, gradient)
    step.python(OpKind.HOST)
    step.work(9, gradient)
    _, _, segments = cut(step)
    written = segments.segments[segments.segment_of[23]]  # START and END are nodes 0 and 1
    assert written.nodes[-1] == 23
    assert [len(segment.nodes) for segment in segments.segments if segment.id > written.id] == [10]


def test_a_small_write_before_a_fetch_is_copied_though_a_large_one_follows() -> None:
    step = Step()
    small, large = step.external(), step.external()
    gradient = step.work(20)
    step.write("sub_", small, gradient)
    step.fetch(gradient)
    step.write("big_sub_", large, gradient)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 22), ("commit", 1)]
    assert len(segments.segments[0].copied_writes) == 1


def test_the_work_after_an_optimizer_need_not_wait_for_python() -> None:
    """A GAN: the generator's half runs ahead again."""
    step = Step()
    critic, generator = step.external(), step.external()
    step.write("big_sub_", critic, step.work(100))
    step.write("big_sub_", generator, step.work(100))
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 100), ("commit", 1), ("functional", 100), ("commit", 1)]


def test_little_work_between_writes_stays_in_the_commit_segment() -> None:
    step = Step()
    weights = [step.external() for _ in range(3)]
    gradient = step.work(100)
    for weight in weights:
        step.write("big_sub_", weight, step.work(30, gradient))
    step.work(30)
    _, _, segments = cut(step)
    assert shape(segments) == [("functional", 130), ("commit", 93)]


def test_little_work_before_a_commit_joins_it() -> None:
    _, _, segments = cut(training_step(0.1, work=2))
    assert shape(segments) == [("commit", 11), ("functional", 1)]


def fed_in_the_middle(number: float, *, fetch: bool, before: int = 3, gap: int = 3) -> Step:
    step = Step()
    value = step.work(before)
    if fetch:
        step.fetch(value)
    value = step.op("scale", step.work(gap, value), number=number)
    step.work(20, value)
    return step


@pytest.mark.parametrize("before", [3, 30])
def test_a_number_fed_after_a_fetch_starts_a_new_segment(before: int) -> None:
    _, _, segments = cut(*(fed_in_the_middle(number, fetch=True, before=before) for number in (0.1, 0.2)))
    assert shape(segments) == [("functional", before + 4), ("functional", 21)]
    assert segments.segments[1].feeds == segments.segments[1].nodes[:1]


def test_a_number_fed_after_little_work_does_not_cut() -> None:
    _, _, segments = cut(*(fed_in_the_middle(number, fetch=False) for number in (0.1, 0.2)))
    assert shape(segments) == [("functional", 27)]


def test_a_number_fed_after_much_work_starts_a_new_segment() -> None:
    _, _, segments = cut(*(fed_in_the_middle(number, fetch=False, before=30) for number in (0.1, 0.2)))
    assert shape(segments) == [("functional", 33), ("functional", 21)]


def annealed(first: float, gap: int) -> Step:
    step = Step()
    value = step.op("scale", step.work(1), number=first)
    step.op("scale", step.work(gap, value), number=first + 1)
    return step


@pytest.mark.parametrize(("gap", "expected"), [(20, [22 + 1]), (100, [102, 1])])
def test_further_fed_numbers_cut_only_after_much_work(gap: int, expected: list[int]) -> None:
    _, _, segments = cut(annealed(0.1, gap), annealed(0.2, gap))
    assert [len(segment.nodes) for segment in segments.segments] == expected


def late_values(step: Step, kind: str) -> None:
    value = step.work(5)
    step.fetch(value)
    if kind == "foreign":
        value = step.op("add", value, step.external(foreign=True))
    elif kind == "host":
        value = step.op("add", value, step.python(OpKind.HOST))
    else:
        value = step.op("aten::lift_fresh", step.external())
    step.work(5, value)


@pytest.mark.parametrize(("kind", "first"), [("foreign", 6), ("host", 7), ("lifted", 6)])
def test_values_that_python_makes_after_a_fetch_start_a_new_segment(kind: str, first: int) -> None:
    step = Step()
    late_values(step, kind)
    _, _, segments = cut(step)
    assert [len(segment.nodes) for segment in segments.segments] == [first, 6]


def test_an_input_that_was_found_to_come_late_after_a_fetch_starts_a_new_segment() -> None:
    step = Step()
    value = step.work(5)
    step.fetch(value)
    step.work(5, step.op("mul", value, step.external()))
    graph, plan, segments = cut(step)
    assert shape(segments) == [("functional", 12)]
    late = {node.id for node in graph.nodes if node.op == "mul"}
    assert shape(cut_segments(graph, plan, by_name(graph), late=late)) == [("functional", 6), ("functional", 6)]


@pytest.mark.parametrize("writes", [False, True])
def test_what_cannot_be_compiled_stands_apart(writes: bool) -> None:
    step = Step()
    value = step.work(5)
    if writes:
        value = step.write("big_add_", step.external(), value)
    value = step.op("odd", step.op("odd", value))
    step.work(5, value)
    graph, plan, segments = cut(step)
    kind = "commit" if writes else "functional"
    assert shape(segments) == [(kind, 12 + writes)]
    odd = {node.id for node in graph.nodes if node.op == "odd"}
    apart = cut_segments(graph, plan, by_name(graph), apart=odd)
    assert shape(apart) == [(kind, 5 + writes), (kind, 1), (kind, 1), (kind, 5)]
    assert [segment.compile for segment in apart.segments] == [True, False, False, True]


def test_a_value_picked_in_plain_python_is_an_input_of_its_segment() -> None:
    steps = []
    for pick in (0, 1):
        step = Step()
        old = step.work(5)
        new = step.work(5, old)
        step.work(5, (old, new)[pick])
        steps.append(step)
    _, _, segments = cut(*steps)
    assert shape(segments) == [("functional", 10), ("functional", 5)]


def test_what_python_has_done_cuts_nothing_whatever_it_picked() -> None:
    """A graph steps over a HOST op, so its choice is none of the graph's."""
    steps = []
    for pick in (0, 1, 0):
        step = Step()
        old = step.work(5)
        new = step.work(5, old)
        step.ops.append(OpRecord("host", 99, 0, OpKind.HOST, (), (), ((old, new)[pick],), 1))
        step.work(5, new)
        steps.append(step)
    graph, _, segments = cut(*steps)
    assert any(node.ambiguous for node in graph.nodes)
    assert shape(segments) == [("functional", 16)]


def test_every_block_is_cut_on_its_own() -> None:
    steps = []
    for extra in (False, True):
        step = Step()
        value = step.work(5)
        if extra:
            step.ops.append(OpRecord("extra", 77, 0, OpKind.COMPUTE, (), (), (value,), 1))
        last = OpRecord("last", 88, 0, OpKind.COMPUTE, (), (), (ValueRef(len(step.ops) - 1, 0),), 1)
        step.ops.append(last)
        steps.append(step)
    _, plan, segments = cut(*steps)
    assert [segment.block for segment in segments.segments] == [0, 1, 2]
    assert segments.of_block == ((0,), (1,), (2,))
    assert len(plan.switch_cases) == 3


TIGHT = st.builds(
    lambda near_ops, more_ops, **rest: Limits(near_ops=near_ops, far_ops=near_ops + more_ops, **rest),
    small_write_bytes=st.just(2 * SMALL),
    copied_bytes=st.integers(0, 5 * SMALL),
    near_ops=st.integers(0, 3),
    more_ops=st.integers(0, 3),
    min_ops=st.integers(1, 4),
)
"""Limits that short programs reach."""


@given(PROGRAMS, st.lists(st.integers(0, 1000), min_size=1, max_size=5), TIGHT, st.sampled_from([1, 2, 3, 7]))
@settings(max_examples=80, deadline=None)
def test_random_programs_never_deadlock_and_never_write_ahead(
    program: Program, seeds: list[int], limits: Limits, apart_of: int
) -> None:
    graph = TraceGraph()
    paths = [merge(graph, run(program, seed)).nodes for seed in seeds]
    plan = assign_cases(graph)

    def bytes_of(node: int, position: int) -> int:
        return (SMALL, SMALL, LARGE)[node % 3]

    apart = {node.id for node in graph.nodes if node.kind == OpKind.COMPUTE and node.id % apart_of == 1}
    segments = cut_segments(graph, plan, bytes_of, limits, apart=apart)
    check_segments(segments, plan, graph, bytes_of, limits)
    for segment in (s for s in segments.segments if not apart.isdisjoint(s.nodes)):
        assert sum(graph.nodes[node].kind != OpKind.HOST for node in segment.nodes) == 1, "graphs step over HOST nodes"
    for path in paths:
        Runners(graph, plan, segments, path).run()
    for segment in segments.segments:
        outside = {(node, position) for node in segment.nodes for position in writes_outside(graph, graph.nodes[node])}
        if segment.kind == "functional":
            assert set(segment.copied_writes) == outside
            assert all(bytes_of(*write) <= limits.small_write_bytes for write in outside)
        else:
            assert segment.copied_writes == ()


def test_limits_that_would_cut_for_ever_are_refused() -> None:
    with pytest.raises(InternalError, match="far_ops >= near_ops"):
        Limits(near_ops=9, far_ops=8)


def test_the_runners_in_miniature_do_find_a_deadlock() -> None:
    graph, plan, segments = cut(training_step(0.1))
    nodes = tuple(itertools.chain.from_iterable(segment.nodes for segment in segments.segments))
    whole = dataclasses.replace(segments.segments[0], nodes=nodes, kind="commit")
    careless = Segments((whole,), ((0,),), (-1, -1, *(0 for _ in nodes)))
    with pytest.raises(DeadlockError):
        Runners(graph, plan, careless, nodes).run()
