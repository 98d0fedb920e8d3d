"""Merging, against the oracle on random programs and by hand on the cases that have a name."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from coexec.errors import InternalError
from coexec.graph.check import check_graph
from coexec.graph.merge import merge
from coexec.graph.order import link
from coexec.graph.tracegraph import END, EXTERNAL_VALUE, MAX_PATHS, START, TraceGraph, node_key
from coexec.records import EXTERNAL, OpKind, OpRecord, Trace, ValueRef
from coexec.trace.check import check_trace
from tests.graph.oracle import NaiveGraph, trie_size
from tests.graph.programs import FOLDED_TRACES, TRACES, chain, cut_short, folded, folded_chain, op, trace


def graph_of(*traces: Trace) -> TraceGraph:
    graph = TraceGraph()
    for one in traces:
        merge(graph, one)
        check_graph(graph)
    return graph


@given(TRACES)
@settings(max_examples=80, deadline=None)
def test_random_traces_give_the_graph_of_the_oracle(traces: list[Trace]) -> None:
    graph, naive = TraceGraph(), NaiveGraph()
    for one in traces:
        check_trace(one)
        assert list(merge(graph, one).nodes) == naive.merge(one)
        check_graph(graph)
    assert [node.children for node in graph.nodes] == [node.children for node in naive.nodes]
    for node, expected in zip(graph.nodes[2:], naive.nodes[2:], strict=True):
        assert node.inputs == expected.inputs
        assert node.fed == naive.fed(node.id)
        assert node.ambiguous == naive.ambiguous(node.id)
    assert len(graph.nodes) - 2 <= trie_size(traces)


@given(FOLDED_TRACES)
@settings(max_examples=120, deadline=None)
def test_random_traces_with_folded_loops_give_the_graph_of_the_oracle(traces: list[Trace]) -> None:
    graph, naive = TraceGraph(), NaiveGraph()
    for one in traces:
        check_trace(one)
        assert list(merge(graph, one).nodes) == naive.merge(one)
        check_graph(graph)
    assert [node.children for node in graph.nodes] == [node.children for node in naive.nodes]
    assert graph.back_edges == naive.back
    folded_keys = [node.key for node in graph.nodes if node.folded]
    assert len(folded_keys) == len(set(folded_keys))
    for node, expected in zip(graph.nodes[2:], naive.nodes[2:], strict=True):
        assert node.inputs == expected.inputs
        assert node.fed == naive.fed(node.id)
        assert naive.older(node.id) <= node.ambiguous <= naive.ambiguous(node.id)
        assert naive.repeats() or node.ambiguous == naive.ambiguous(node.id)


@given(FOLDED_TRACES)
@settings(max_examples=50, deadline=None)
def test_a_trace_with_loops_merged_again_is_covered_and_takes_the_same_path(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    for one, path in zip(traces, paths, strict=True):
        again = merge(graph, one)
        assert (again.new_nodes, again.new_edges, again.new_inputs, again.new_fed) == ((), (), (), ())
        assert again.nodes == path


@given(TRACES)
@settings(max_examples=50, deadline=None)
def test_every_merged_trace_is_a_path_whose_dataflow_is_allowed(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    for one, path in zip(traces, paths, strict=True):
        assert all(edge in graph.edge_visits for edge in itertools.pairwise((START, *path, END)))
        for record, at in zip(one.ops, path, strict=True):
            assert graph.nodes[at].key == node_key(record)
            for position, ref in enumerate(record.inputs):
                source = EXTERNAL_VALUE if ref.producer == EXTERNAL else (path[ref.producer], ref.output)
                assert source in graph.nodes[at].inputs[position]


@given(TRACES)
@settings(max_examples=50, deadline=None)
def test_a_trace_merged_again_is_covered_and_takes_the_same_path(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    for one, path in zip(traces, paths, strict=True):
        again = merge(graph, one)
        assert again.covered
        assert again.nodes == path


@given(TRACES)
@settings(max_examples=40, deadline=None)
def test_a_validated_prefix_gives_the_same_graph_as_matching_it_again(traces: list[Trace]) -> None:
    plain, resumed = TraceGraph(), TraceGraph()
    for one in traces:
        merge(plain, one)
        merge(resumed, one)
    first = traces[0]
    nodes = merge(plain, first).nodes
    half = len(nodes) // 2
    marked = tuple(
        dataclasses.replace(record, node=at) if index < half else record
        for index, (record, at) in enumerate(zip(first.ops, nodes, strict=True))
    )
    result = merge(resumed, dataclasses.replace(first, ops=marked))
    assert result.nodes == nodes
    assert not result.new_nodes
    assert plain.edge_visits == resumed.edge_visits
    check_graph(resumed)


def test_the_first_trace_becomes_a_chain_from_start_to_end() -> None:
    graph = TraceGraph()
    result = merge(graph, chain(10, 20, 30))
    assert result.nodes == (2, 3, 4)
    assert result.new_nodes == ((2, 0), (3, 1), (4, 2))
    assert result.new_edges == ((START, 2), (2, 3), (3, 4), (4, END))
    assert result.new_inputs == ((2, 0, EXTERNAL_VALUE), (3, 0, (2, 0)), (4, 0, (3, 0)))
    assert not result.covered


def test_a_changed_number_becomes_fed_without_a_new_node() -> None:
    graph = graph_of(trace(op(10, -1, number=0.1)))
    result = merge(graph, trace(op(10, -1, number=0.2)))
    assert (result.new_nodes, result.new_fed) == ((), ((2, 0),))
    assert merge(graph, trace(op(10, -1, number=0.3))).covered
    assert graph.nodes[2].numbers == (0.3,)


@pytest.mark.parametrize(
    ("before", "after", "fed"),
    [
        (1, 1.0, True),
        (1, True, True),
        (0.0, -0.0, True),
        ((1, 2), (1, 2, 3), True),
        ((1, 2), (1.0, 2), True),
        (2.0, 2.0 + 0j, True),
        (float("nan"), float("nan"), False),
        ((1, 2), (1, 2), False),
    ],
)
def test_a_number_is_compared_by_value_type_and_length(before: object, after: object, fed: bool) -> None:
    graph = graph_of(trace(op(10, -1, number=before)))
    result = merge(graph, trace(op(10, -1, number=after)))
    assert result.covered is not fed
    assert graph.nodes[2].fed == ({0} if fed else set())


def test_a_changed_static_attribute_is_another_node() -> None:
    graph = graph_of(trace(op(10, -1, static="mean")))
    assert merge(graph, trace(op(10, -1, static="sum"))).new_nodes == ((3, 0),)


def test_another_number_of_inputs_is_another_node() -> None:
    graph = graph_of(trace(op(10, -1)))
    assert merge(graph, trace(op(10, -1, -1))).new_nodes == ((3, 0),)


def test_a_branch_merges_back() -> None:
    graph = graph_of(chain(10, 20, 40))
    result = merge(graph, chain(10, 30, 40))
    assert result.nodes == (2, 5, 4)
    assert result.new_nodes == ((5, 1),)
    assert result.new_edges == ((2, 5), (5, 4))
    assert graph.nodes[4].inputs == [{(3, 0), (5, 0)}]
    assert graph.nodes[4].ambiguous == set()


def test_a_skipped_stretch_is_one_edge() -> None:
    graph = graph_of(chain(10, 20, 30, 40))
    assert merge(graph, chain(10, 40)).new_edges == ((2, 5),)


def test_loops_with_different_trip_counts_share_nodes() -> None:
    def loop(trips: int) -> Trace:
        return chain(10, *(100 + trip for trip in range(trips)), 50)

    graph = graph_of(loop(3))
    longer = merge(graph, loop(5))
    assert [index for _, index in longer.new_nodes] == [4, 5]
    assert longer.nodes[-1] == 6
    shorter = merge(graph, loop(1))
    assert shorter.new_nodes == ()
    assert shorter.nodes == (*longer.nodes[:2], longer.nodes[-1])
    check_graph(graph)


def test_a_folded_loop_is_one_stretch_whatever_its_trip_count() -> None:
    graph = graph_of(folded_chain(10, 100, 101, 50))
    longer = merge(graph, folded_chain(10, 100, 101, 100, 101, 100, 101, 50))
    assert longer.nodes == (2, 3, 4, 3, 4, 3, 4, 5)
    assert longer.new_nodes == ()
    assert longer.new_edges == ((4, 3),)
    assert graph.back_edges == {(4, 3)}
    check_graph(graph)
    assert merge(graph, folded_chain(10, *[100, 101] * 7, 50)).covered
    assert graph.nodes[3].inputs == [{(2, 0), (4, 0)}]
    assert graph.nodes[3].ambiguous == set()


def test_a_pass_that_skips_an_op_makes_no_back_edge_inside_the_body() -> None:
    graph = graph_of(folded_chain(100, 101, 102, 100, 101, 102))
    assert merge(graph, folded_chain(100, 102, 100, 101, 102, 100, 102)).new_edges == ((2, 4),)
    assert graph.back_edges == {(4, 2)}
    check_graph(graph)


def test_a_value_of_an_older_pass_is_ambiguous() -> None:
    backward = [folded(200, 2), folded(200, 1), folded(200, 0)]
    graph = graph_of(trace(folded(100, -1), folded(100, 0), folded(100, 1), *backward))
    assert graph.nodes[2].ambiguous == set()
    assert graph.nodes[3].ambiguous == {0}


def test_numbers_that_differ_from_pass_to_pass_are_fed() -> None:
    graph = graph_of(trace(folded(100, -1, number=0), folded(100, 0, number=1)))
    assert graph.nodes[2].fed == {0}
    assert merge(graph, trace(*(folded(100, k - 1, number=k) for k in range(5)))).covered


def test_an_op_that_is_not_folded_can_lie_in_a_loop() -> None:
    """Once per iteration, in a pass that differs: it does not make copies of the loop."""
    graph = graph_of(folded_chain(100, 20, 100, 100), folded_chain(100, 100, 20, 100))
    assert [node.op for node in graph.nodes[2:]] == ["test::op100", "test::op20"]
    assert graph.back_edges == {(3, 2), (2, 2)}


def test_a_prefix_may_pass_a_folded_node_again() -> None:
    graph = graph_of(folded_chain(100, 101))
    again = [dataclasses.replace(folded(place), numbers=(), node=at) for place, at in ((100, 2), (101, 3), (100, 2))]
    result = merge(graph, trace(*again, op(50, 1)))
    assert result.nodes == (2, 3, 2, 4)
    assert graph.back_edges == {(3, 2)}
    check_graph(graph)


def test_an_op_at_another_place_of_each_trace_makes_no_other_op_anew() -> None:
    """Stochastic downsampling: ops after a block that is drawn. The blocks stay what they are."""
    blocks = list(range(10, 70, 10))
    for drawn in ([5], [5, 6, 7]):
        graph = TraceGraph()
        for place in (3, 1, 5, 2, 4):
            result = merge(graph, chain(*blocks[:place], *drawn, *blocks[place:]))
            assert place == 3 or [index - place for _, index in result.new_nodes] == [*range(len(drawn))]
            check_graph(graph)
        assert len(graph.nodes) - 2 == len(blocks) + 5 * len(drawn)
        for place in (1, 2, 3, 4, 5):
            assert merge(graph, chain(*blocks[:place], *drawn, *blocks[place:])).covered


def test_reordered_ops_make_a_second_node_and_no_cycle() -> None:
    graph = graph_of(chain(10, 20, 30, 40))
    result = merge(graph, chain(10, 30, 20, 40))
    check_graph(graph)
    assert result.nodes == (2, 6, 3, 5)
    assert result.new_nodes == ((6, 1),)
    assert graph.by_key[graph.nodes[4].key] == [4, 6]
    assert merge(graph, chain(10, 30, 20, 40)).nodes == (2, 6, 3, 5)
    assert merge(graph, chain(10, 20, 30, 40)).nodes == (2, 3, 4, 5)


def test_a_child_with_the_key_is_preferred_to_an_older_node() -> None:
    graph = graph_of(chain(10, 20, 30), chain(10, 30, 20))
    second = merge(graph, chain(10, 30, 20)).nodes
    assert second[1] == graph.by_key[graph.nodes[second[1]].key][1]


def test_a_whole_reversal_adds_every_op_but_the_one_it_begins_with() -> None:
    locations = range(10, 210)
    graph = graph_of(chain(*locations))
    merge(graph, chain(*reversed(locations)))
    check_graph(graph)
    assert len(graph.nodes) == 2 + 200 + 199


def test_a_step_that_raised_has_no_edge_to_end() -> None:
    graph = graph_of(chain(10, 20, 30))
    result = merge(graph, cut_short(chain(10, 20, 30), 2))
    assert result.covered
    assert END not in graph.nodes[3].children
    first = graph_of(cut_short(chain(10, 20), 2))
    assert (2, 3) in first.edge_visits
    assert first.nodes[END].parents == []


def test_an_empty_step_goes_from_start_to_end() -> None:
    graph = TraceGraph()
    assert merge(graph, trace()).new_edges == ((START, END),)
    assert merge(graph, trace()).covered


def test_memory_that_others_write_is_noticed_once() -> None:
    def step(external: int) -> Trace:
        return trace(dataclasses.replace(op(10, -1), inputs=(ValueRef(EXTERNAL, external),)))

    graph = graph_of(step(0))
    assert merge(graph, step(2)).new_foreign == ((2, 0),)
    assert merge(graph, step(2)).covered
    assert graph.nodes[2].foreign == {0}


def test_a_choice_made_in_plain_python_is_ambiguous_whichever_trace_comes_first() -> None:
    picks_old = trace(op(10, -1), op(20, 0), op(30, 0))
    picks_new = trace(op(10, -1), op(20, 0), op(30, 1))
    for first, second in ((picks_old, picks_new), (picks_new, picks_old)):
        graph = graph_of(first)
        assert merge(graph, second).new_ambiguous == ((4, 0),)
        assert merge(graph, first).covered


def test_a_choice_between_two_outputs_of_one_op_is_ambiguous() -> None:
    pair = dataclasses.replace(op(10, -1), n_outputs=2)
    first, second = (trace(pair, dataclasses.replace(op(20), inputs=(ValueRef(0, output),))) for output in (0, 1))
    graph = graph_of(first)
    assert merge(graph, second).new_ambiguous == ((3, 0),)
    assert merge(graph, first).covered


def test_a_value_overwritten_in_a_branch_is_decided_by_the_path() -> None:
    graph = graph_of(trace(op(10, -1), op(20, 0), op(30, 1)), trace(op(10, -1), op(30, 0)))
    assert graph.nodes[4].inputs == [{(2, 0), (3, 0)}]
    assert graph.nodes[4].ambiguous == set()


def test_a_prefix_marked_with_the_wrong_node_is_our_bug() -> None:
    graph = graph_of(chain(10, 20))
    with pytest.raises(InternalError, match="marked as node 3"):
        merge(graph, trace(dataclasses.replace(op(10, -1), node=3)))
    with pytest.raises(InternalError, match="marked as node 99"):
        merge(graph, trace(dataclasses.replace(op(10, -1), node=99)))


def test_a_prefix_that_goes_back_is_our_bug() -> None:
    graph = graph_of(chain(10, 20))
    with pytest.raises(InternalError, match="before its predecessor"):
        merge(graph, trace(dataclasses.replace(op(20, -1), node=3), dataclasses.replace(op(10, -1), node=2)))


def validated(location: int, node: int) -> OpRecord:
    """Returns what the runner reports of an op that it matched before the fallback: neither inputs nor numbers."""
    return dataclasses.replace(op(location), numbers=(), static=(), node=node)


def test_an_edge_that_closes_a_cycle_is_our_bug_and_no_endless_loop() -> None:
    graph = graph_of(chain(10, 20, 30))
    with pytest.raises(InternalError, match="closes a cycle"):
        link(graph, 4, 2)


def test_a_missing_edge_of_a_prefix_is_added() -> None:
    graph = graph_of(trace(op(10, -1), op(20, -1), op(30, 0)))
    result = merge(graph, trace(validated(10, 2), validated(30, 4), op(40, 1)))
    assert result.new_edges == ((2, 4), (4, 5), (5, END))
    assert result.new_inputs == ((5, 0, (4, 0)),)
    check_graph(graph)


def test_a_prefix_teaches_nothing_about_inputs_and_numbers() -> None:
    graph = graph_of(trace(op(10, -1, number=0.1), op(20, 0)))
    assert merge(graph, trace(validated(10, 2), op(20, 0))).covered
    assert graph.nodes[2].fed == set()
    assert graph.nodes[2].numbers == (0.1,)


def test_visits_count_traces() -> None:
    graph = graph_of(chain(10, 20, 40), chain(10, 30, 40), chain(10, 30, 40))
    assert [graph.nodes[at].visits for at in (START, 2, 3, 5, 4, END)] == [3, 3, 1, 2, 3, 3]
    assert graph.edge_visits[2, 5] == 2


def test_only_the_most_travelled_paths_are_kept() -> None:
    graph = TraceGraph()
    for _ in range(2):
        merge(graph, chain(1, 2))
    for location in range(100, 100 + MAX_PATHS + 10):
        merge(graph, chain(1, location))
    assert len(graph.paths) == MAX_PATHS
    assert max(path.count for path in graph.paths.values()) == 2
    check_graph(graph)


def test_kinds_are_part_of_the_key() -> None:
    graph = graph_of(trace(op(10, -1)))
    assert merge(graph, trace(op(10, -1, kind=OpKind.SYNC))).new_nodes
