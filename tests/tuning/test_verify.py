"""The verification: what is right although it differs, and what is wrong although it is close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from coexec.backends.candidates.program import Program
from coexec.tuning.inputs import input_sets
from coexec.tuning.oracle import run_pair
from coexec.tuning.verify import Report, verify, verify_quickly

aten = torch.ops.aten


def program_of(build: Callable[..., Any], *inputs: Any, static: tuple[int, ...] = ()) -> Program:
    """The graph that `build(graph, *placeholders)` makes; it returns the outputs."""
    graph = Graph()
    nodes = [graph.placeholder(f"in{position}") for position in range(len(inputs))]
    graph.output(tuple(build(graph, *nodes)))
    return Program(GraphModule(torch.nn.Module(), graph), inputs, static)


def matmul() -> Program:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator) for _ in range(2))
    return program_of(lambda g, x, y: [g.call_function(aten.mm.default, (x, y))], a, b)


def check(program: Program, run: Callable[..., Any]) -> Report:
    return verify(program, run, input_sets(program))


def test_eager_itself_is_accepted_on_three_sets_of_inputs() -> None:
    program = matmul()
    report = check(program, program.run_eagerly)
    assert report.problems == []
    assert report.compared == 6  # three sets, first and last call of each
    assert report.wide


def test_a_more_exact_result_is_right_although_it_differs() -> None:
    program = matmul()
    report = check(program, lambda x, y: ((x.double() @ y.double()).float(),))
    assert report.problems == []
    assert report.worst < 1


def test_half_precision_inside_is_wrong() -> None:
    program = matmul()
    report = check(program, lambda x, y: ((x.bfloat16() @ y.bfloat16()).float(),))
    assert "off the float64 run" in report.problems[0]
    assert not verify_quickly(program, lambda x, y: ((x.bfloat16() @ y.bfloat16()).float(),), program.inputs).accepted


def test_a_nan_on_one_side_is_wrong() -> None:
    program = matmul()

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        result = x @ y
        result[3, 4] = torch.nan
        return (result,)

    assert "infinite or NaN only on one side" in check(program, run).problems[0]


def test_an_integer_that_differs_is_wrong_unless_rounding_decides_it() -> None:
    values = torch.linspace(-1, 1, 100)
    program = program_of(lambda g, x: [g.call_function(aten.gt.Scalar, (x, 0.0))], values)
    assert check(program, lambda x: (x > 0,)).problems == []
    assert "elements differ" in check(program, lambda x: (x > 0.5,)).problems[0]


def test_a_decision_at_the_margin_may_fall_either_way() -> None:
    """`x * 0.1 * 10 > x` is decided by the last bit: another rounding is no error."""

    def build(graph: Graph, x: Any) -> list[Any]:
        part = graph.call_function(aten.mul.Tensor, (x, 0.1))
        product = graph.call_function(aten.mul.Tensor, (part, 10.0))
        return [graph.call_function(aten.gt.Tensor, (product, x))]

    program = program_of(build, torch.rand(50) + 0.5)
    report = check(program, lambda x: (((x.double() * 0.1) * 10).float() > x,))
    assert report.problems == []
    assert report.by_noise > 0


def test_random_draws_must_be_eagers() -> None:
    program = program_of(lambda g, x: [g.call_function(torch.ops.aten.bernoulli.p, (x, 0.5))], torch.zeros(64, 64))
    assert check(program, program.run_eagerly).problems == []

    def other(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.bernoulli(torch.full_like(x, 0.5), generator=torch.Generator().manual_seed(7)),)

    problems = " ".join(check(program, other).problems)
    assert "generator is left in another state" in problems
    assert "off the float64 run" in problems


def test_dropout_in_float64_follows_the_mask_of_float32() -> None:
    program = program_of(
        lambda g, x: [
            g.call_function(__import__("operator").getitem, (node, 0))
            for node in [g.call_function(aten.native_dropout.default, (x, 0.25, True))]
        ],
        torch.randn(64),
    )
    narrow, wide = run_pair(program, program.inputs)
    assert torch.equal(narrow[0] == 0, wide[0] == 0)
    assert wide[0].dtype == torch.float64
    assert torch.allclose(narrow[0].double(), wide[0], rtol=1e-6)


def test_memory_read_as_another_dtype_is_compared_with_eager() -> None:
    program = program_of(lambda g, x: [g.call_function(aten.view.dtype, (x, torch.int32))], torch.randn(8))
    report = check(program, program.run_eagerly)
    assert report.problems == []


def test_an_output_may_share_memory_only_where_eagers_does() -> None:
    copying = program_of(lambda g, x: [g.call_function(aten.clone.default, (x,))], torch.randn(8))
    assert "shares memory with an input" in check(copying, lambda x: (x,)).problems[0]
    passing = program_of(lambda g, x: [x], torch.randn(8))
    assert check(passing, lambda x: (x,)).problems == []


def test_results_of_two_calls_are_apart_and_autograd_takes_them() -> None:
    program = program_of(lambda g, x: [g.call_function(aten.zeros_like.default, (x,))], torch.randn(8))
    kept = torch.zeros(8)
    assert "memory of what an earlier call" in check(program, lambda x: (kept,)).problems[0]

    def in_inference_mode(x: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.inference_mode():
            return (torch.zeros_like(x),)

    assert "inference tensor" in check(program, in_inference_mode).problems[0]


def test_none_and_numbers_are_outputs_too() -> None:
    program = program_of(lambda g, x: [None, 3, x], torch.randn(4))
    assert check(program, lambda x: (None, 3, x)).problems == []
    assert "output 1" in check(program, lambda x: (None, 4, x)).problems[0]
    assert "2 outputs" not in check(program, lambda x: (None, 4)).problems[0]


@pytest.mark.parametrize("returned", [None, (), [torch.zeros(1)]])
def test_a_result_of_another_form_is_wrong(returned: Any) -> None:
    program = matmul()
    assert "outputs are expected" in check(program, lambda *_: returned).problems[0]


def test_the_users_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    program = program_of(lambda g, x: [g.call_function(aten.bernoulli.p, (x, 0.5))], torch.zeros(4))
    check(program, program.run_eagerly)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_vary_in_place_only_and_static_ones_stay() -> None:
    indices, weight = torch.tensor([[3, 1], [0, 2]]), torch.randn(4, 5)
    program = program_of(
        lambda g, w, i: [g.call_function(aten.embedding.default, (w, i))], weight, indices, static=(0,)
    )
    first, *others = input_sets(program)
    assert first[1] is indices
    assert len(others) == 2
    for weights, varied in others:
        assert weights is weight
        assert sorted(varied.flatten().tolist()) == [0, 1, 2, 3]
