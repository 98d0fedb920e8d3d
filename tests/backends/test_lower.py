"""Lowered graphs, run uncompiled, give eager's results: fed numbers, shared memory, in-place writes, draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from coexec.backends.fed import NotLowerableError, takes_fed
from coexec.backends.lower import lower
from coexec.backends.spec import Mode, SpecError
from tests.backends.programs import PROGRAMS
from tests.backends.recording import Recorder, Recording, feed_differences, record

Run = Callable[[Recorder], Sequence[torch.Tensor]]

EXACT_BITS = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 1, torch.int64: 0, torch.bool: 0}


def run_graph(graph: GraphModule, recording: Recording) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and the inputs after the run."""
    inputs = recording.fresh_inputs()
    torch.set_rng_state(recording.rng_before)
    with torch.no_grad():
        results = graph(*inputs)
    return list(results), inputs


def fed(build: Callable[[float], Run], first: float = 0.37, second: float = 0.81) -> Recording:
    """Record with two numbers; what differs is fed."""
    return feed_differences(record(build(first)), record(build(second)))


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a few units in the last place of the largest element."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(got, expected)
        return
    bound = EXACT_BITS[got.dtype] * torch.finfo(got.dtype).eps * expected.double().abs().max()
    assert (got.double() - expected.double()).abs().max() <= bound


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(7, 9).to(dtype)


ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "add alpha": lambda a, b, n: torch.add(a, b, alpha=n),
    "sub alpha in place": lambda a, b, n: a.clone().sub_(b, alpha=n),
    "add wrapped": lambda a, b, n: a + n,
    "rsub wrapped": lambda a, b, n: n - a,
    "mul wrapped in place": lambda a, b, n: a.clone().mul_(n),
    "div wrapped": lambda a, b, n: a / n,
    "floor div": lambda a, b, n: torch.div(a, n, rounding_mode="floor"),
    "remainder": lambda a, b, n: torch.remainder(a, n),
    "reciprocal": lambda a, b, n: n / (a.abs() + 1),
    "addcmul": lambda a, b, n: torch.addcmul(a, a, b, value=n),
    "addcdiv in place": lambda a, b, n: a.clone().addcdiv_(a, b.abs() + 1, value=n),
    "lerp below half": lambda a, b, n: torch.lerp(a, b, n / 2),
    "lerp above half": lambda a, b, n: torch.lerp(a, b, 0.5 + n / 2),
    "clamp": lambda a, b, n: a.clamp(-n, n),
    "clamp min in place": lambda a, b, n: a.clone().clamp_min_(n),
    "clamp crossed": lambda a, b, n: a.clamp(n, -n),
    "fill": lambda a, b, n: a.clone().fill_(n),
    "masked fill": lambda a, b, n: a.masked_fill(a > 0, n),
    "where": lambda a, b, n: torch.where(a > b, a, n),
    "compare": lambda a, b, n: a > n,
    "power of a fed base": lambda a, b, n: torch.pow(n, a.clamp(-2, 2)),
    "full": lambda a, b, n: torch.full((3, 2), n),
    "full_like": lambda a, b, n: torch.full_like(a, n),
    "foreach add": lambda a, b, n: torch._foreach_add([a, b], n)[1],
    "foreach add list": lambda a, b, n: torch._foreach_add([a, b], [b, a], alpha=n)[0],
    "foreach mul list": lambda a, b, n: torch._foreach_mul([a, b], [n, 2.0])[0],
    "foreach addcdiv": lambda a, b, n: torch._foreach_addcdiv([a], [a], [b.abs() + 1], [n])[0],
    "foreach lerp": lambda a, b, n: torch._foreach_lerp([a], [b], n)[0],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fed_numbers_follow_eager(name: str, dtype: torch.dtype) -> None:
    a, b = x(dtype), x(dtype).flip(0)
    recording = fed(lambda n: lambda _: [ELEMENTWISE[name](a, b, n)])
    assert any("number" in str(type(i)).lower() for i in recording.spec.inputs)
    results, _ = run_graph(lower(recording.spec, {}), recording)
    assert_near(results[0], recording.outputs[0])
    # The graph must depend on the number, not on the value it had while recording.
    other = replace(recording, inputs=[t * 2 if t.dim() == 0 else t for t in recording.inputs])
    changed, _ = run_graph(lower(recording.spec, {}), other)
    assert not torch.equal(changed[0], results[0])


@pytest.mark.parametrize(
    ("name", "argument", "taken"),
    [
        ("aten::add.Tensor", 2, True),
        ("aten::_foreach_mul_.Scalar", 1, True),
        ("aten::full", 1, True),
        ("aten::native_layer_norm", 4, False),
        ("aten::pow.Tensor_Scalar", 1, False),
        ("aten::pow.Scalar", 0, True),
        ("aten::add.out", 2, False),
    ],
)
def test_which_numbers_a_graph_takes(name: str, argument: int, taken: bool) -> None:
    assert takes_fed(name, argument) is taken


def test_a_fed_number_on_integers_promotes_as_in_eager() -> None:
    a = torch.arange(6)
    for op in (lambda n: a * n, lambda n: a / n, lambda n: a + n):
        recording = fed(lambda n, op=op: lambda _: [op(n)])  # type: ignore[misc]
        results, _ = run_graph(lower(recording.spec, {}), recording)
        assert_near(results[0], recording.outputs[0])


def test_in_place_foreach_returns_nothing_and_writes_its_inputs() -> None:
    def build(n: float) -> Run:
        a = [x(), x() + 1]

        def run(_: Recorder) -> Sequence[torch.Tensor]:
            torch._foreach_mul_(a, n)
            torch._foreach_add_(a, a, alpha=n)
            return []

        return run

    recording = fed(build)
    results, _ = run_graph(lower(recording.spec, {}), recording)
    for got, expected in zip(results, recording.mutated, strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("shape", [(6, 9), (6, 9, 5), (3, 9, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_backward_of_any_number_of_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Without the dimensions behind the channels there is nothing to sum up in a sample."""
    torch.manual_seed(3)
    images, grad, weight = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), torch.rand(9, dtype=dtype)
    _, mean, inverse = torch.ops.aten.native_batch_norm(images, weight, None, None, None, True, 0.1, 1e-5)

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        return torch.ops.aten.native_batch_norm_backward(
            grad, images, weight, None, None, mean, inverse, True, 1e-5, [True, True, True]
        )

    recording = record(run)
    results, _ = run_graph(lower(recording.spec, {}), recording)
    for got, expected in zip(results, recording.outputs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


FOREACH: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "twice": lambda a, b: torch._foreach_mul_([a, a], 0.9),
    "reads what it wrote": lambda a, b: torch._foreach_add_([a, b], [b, a], alpha=2),
    "through a view": lambda a, b: torch._foreach_mul_([a, a[1:]], [0.9, 0.8]),
    "a tensor of its own": lambda a, b: torch._foreach_addcdiv_([a, b], [b, b], [b, a.abs() + 1], 0.5),
    "apart": lambda a, b: torch._foreach_add_([a, b], [a, b]),
}


@pytest.mark.parametrize("name", FOREACH)
def test_in_place_foreach_runs_element_by_element(name: str) -> None:
    """Found by random programs: `_foreach_mul_([a, a], 0.9)` multiplies twice."""
    a, b = x() + 3, x().flip(0) + 3

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        FOREACH[name](a, b)
        return [a * 1, b * 1]

    recording = record(run)
    results, _ = run_graph(lower(recording.spec, {}), recording)
    for got, expected in zip(results, recording.outputs + recording.mutated, strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", ["commit", "functional"])
def test_programs_give_eagers_results(name: str, mode: Mode) -> None:
    recording = PROGRAMS[name](mode=mode)
    graph = lower(recording.spec, {})
    results, inputs = run_graph(graph, recording)
    split = len(recording.spec.outputs)
    contents = results[split : split + len(recording.mutated)]  # behind them: draws that nobody uses
    mutated = contents if mode == "functional" else [inputs[i] for i in recording.spec.mutated]
    for got, expected in zip(results[:split] + mutated, recording.outputs + recording.mutated, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
    assert [t.stride() for t in results[:split]] == [t.stride() for t in recording.outputs]
    if mode == "functional":
        assert all(torch.equal(a, b) for a, b in zip(inputs, recording.inputs, strict=True))
    marks = [n for n in graph.graph.nodes if "mark" in str(n.target)]
    assert [n.args[1] for n in marks] == [p.channel for p in recording.spec.publishes]


def shared_memory(run: Callable[[torch.Tensor], Sequence[torch.Tensor]], mode: Mode = "functional") -> Recording:
    memory = torch.arange(20.0)
    return record(lambda _: run(memory), mode)


def test_overlapping_inputs_see_each_others_writes() -> None:
    def run(memory: torch.Tensor) -> Sequence[torch.Tensor]:
        left, right, whole = memory[:12], memory[8:], memory
        recorded_whole = whole * 1  # makes `whole` an input too
        left.mul_(2)
        right.add_(left.sum())
        return [recorded_whole, whole + 0]

    recording = shared_memory(run)
    results, inputs = run_graph(lower(recording.spec, {}), recording)
    assert all(torch.equal(a, b) for a, b in zip(results, recording.outputs + recording.mutated, strict=True))
    assert torch.equal(inputs[0], recording.inputs[0])


def test_inputs_that_do_not_overlap_are_separate_although_they_share_a_storage() -> None:
    memory = torch.arange(20.0)
    left, right = memory[:10], memory[10:]
    recording = record(lambda _: [left.add_(right), right * 2][1:], "commit")
    _, inputs = run_graph(lower(recording.spec, {}), recording)
    assert torch.equal(inputs[0], recording.mutated[0])


def test_overlapping_writes_without_a_base_are_refused() -> None:
    memory = torch.arange(20.0)
    left, right = memory[:12], memory[8:]
    recording = record(lambda _: [left.add_(1), right * 2][1:])
    with pytest.raises(NotLowerableError, match="pass their base too"):
        lower(recording.spec, {})


def test_writes_under_a_mask_have_a_static_size() -> None:
    a = x()

    def run(_: Recorder) -> Sequence[torch.Tensor]:
        fresh = a * 1
        fresh[fresh > 0] = 7.0
        fresh[torch.tensor([1, 3])] = a[torch.tensor([0, 2])]
        return [fresh]

    recording = record(run)
    results, _ = run_graph(lower(recording.spec, {}), recording)
    assert torch.equal(results[0], recording.outputs[0])


def test_absolute_offsets_of_as_strided_count_from_the_input() -> None:
    view = torch.arange(30.0)[10:]
    recording = record(lambda _: [view.as_strided((2, 3), (3, 1), 14) + 0])
    # A compiled graph is given addresses, so an input is at offset 0 of what it sees; the graph run here is as well.
    at_zero = replace(recording, inputs=[t.clone() for t in recording.inputs])
    results, _ = run_graph(lower(recording.spec, {}), at_zero)
    assert torch.equal(results[0], recording.outputs[0])


def test_batch_norm_statistics_are_outputs_although_no_schema_says_so() -> None:
    norm = torch.nn.BatchNorm1d(9)
    inputs = x()
    recording = record(lambda _: [norm(inputs).detach()])
    assert len(recording.spec.mutated) == 3  # running mean, running variance, number of batches
    results, after = run_graph(lower(recording.spec, {}), recording)
    for got, expected in zip(results[1:], recording.mutated, strict=True):
        assert_near(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(after, recording.inputs, strict=True))
    counter = [i for i in recording.spec.mutated if recording.spec.input_value(i).dtype == "int64"]
    forgotten = replace(recording.spec, mutated=tuple(counter))
    with pytest.raises(SpecError, match="native_batch_norm writes value"):
        lower(forgotten, {})


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "bernoulli": lambda: torch.empty(5, 8).bernoulli_(0.3),
    "bernoulli channels last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).bernoulli_(0.3),
    "bernoulli permuted": lambda: torch.empty_strided((4, 12, 8), (8, 32, 1)).bernoulli_(0.6),
    "bernoulli of booleans": lambda: torch.empty(40, dtype=torch.bool).bernoulli_(0.3),
    "uniform": lambda: torch.empty(5, 8).uniform_(-2, 3),
    "uniform permuted": lambda: torch.empty(5, 8).t().uniform_(),
    "normal": lambda: torch.empty(5, 8).normal_(1.0, 2.0),
    "rand": lambda: torch.rand(3, 7),
    "rand double": lambda: torch.rand(3, 7, dtype=torch.float64),
    "rand_like channels last": lambda: torch.rand_like(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "randn": lambda: torch.randn(30),
    "randn_like": lambda: torch.randn_like(torch.empty(4, 5)),
    "randint": lambda: torch.randint(3, 50, (20,)),
    "random_": lambda: torch.empty(20, dtype=torch.int64).random_(10),
    "randperm": lambda: torch.randperm(30),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(30), 0.4),
    "native_dropout": lambda: torch.native_dropout(torch.ones(6, 5).t(), 0.4, True)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_eagers(name: str) -> None:
    def run(_: Recorder) -> Sequence[torch.Tensor]:
        first = DRAWS[name]()
        DRAWS[name]()  # dropped, drawn all the same
        return [first, DRAWS[name]()]

    recording = record(run)
    assert recording.spec.random
    results, _ = run_graph(lower(recording.spec, {}), recording)
    assert torch.equal(torch.get_rng_state(), recording.rng_after)
    assert len(results) == 3  # the dropped one comes last: nothing else would keep the compiler from removing it
    for got, expected in zip(results[:2], recording.outputs, strict=True):
        assert_near(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda a: [a.t().contiguous().t().clone().normal_()], "not contiguous"),
        (lambda a: [torch.empty(4, 20)[:, :8].bernoulli_(0.5)], "with gaps"),
        (lambda a: [a.clone().exponential_()], "no rule"),
        (lambda a: [torch.rand(3, generator=torch.Generator())], "generator of its own"),
        (lambda a: [a[a > 0]], "mask"),
        (lambda a: [torch.bernoulli(a.sigmoid())], "probability is a tensor"),
        (lambda a: [a.nonzero()], "depends on data"),
        (lambda a: [a.resize_(2, 2)], "size of its storage"),
    ],
)
def test_what_cannot_be_compiled_says_why(run: Callable[[torch.Tensor], Sequence[torch.Tensor]], message: str) -> None:
    a = x()
    recording = record(lambda _: run(a))
    with pytest.raises(NotLowerableError, match=message):
        lower(recording.spec, {})


def test_a_fed_exponent_and_a_fed_probability_are_refused() -> None:
    a = x().abs()
    with pytest.raises(NotLowerableError, match="exponent"):
        lower(fed(lambda n: lambda _: [a**n]).spec, {})
    with pytest.raises(NotLowerableError, match="changes between iterations"):
        lower(fed(lambda n: lambda _: [torch.nn.functional.leaky_relu(a, n)]).spec, {})
