"""Which inputs of a graph are indices: whatever eager raises for is found before a call, by looking at inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError
from coexec.backends.graph_indices import GraphIndices, graph_indices

TABLE, SCORES = torch.randn(7, 4), torch.randn(3, 5)
PROBES = (-200, -101, -100, -28, -8, -7, -6, -5, -4, -1, 0, 1, 3, 4, 5, 6, 7, 8, 27, 28, 100, 5000)

KNOWN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda i, t: F.embedding(i, t),
    "through views and copies": lambda i, t: F.embedding(i[None].expand(2, 3).contiguous().flatten(), t),
    "parts of it joined": lambda i, t: F.embedding(torch.cat([i[:1], i[1:]]), t),
    "pieces": lambda i, t: F.embedding(i.split(1)[1], t),
    "as 32 bits": lambda i, t: F.embedding(i.int(), t),
    "shifted": lambda i, t: F.embedding(i + 2, t),
    "shifted down": lambda i, t: t[i - 1],
    "shifted by a constant tensor": lambda i, t: t[i + torch.tensor([1, 2, 2])],
    "padded": lambda i, t: F.embedding(F.pad(i, (0, 2), value=3), t),
    "masked": lambda i, t: t[torch.where(i > 100, torch.zeros_like(i), i)],
    "position": lambda i, t: t[i],
    "second position": lambda i, t: t[:, i],
    "written by position": lambda i, t: t.index_put((i,), torch.zeros(3, 4)),
    "beside a range": lambda i, t: t[torch.arange(3), i],
    "gather": lambda i, t: t.gather(1, i[:, None]),
    "scatter": lambda i, t: torch.zeros(4).scatter_add(0, i, torch.ones(3)),
    "index_select": lambda i, t: t.index_select(1, i),
    "take": lambda i, t: t.take(i),
    "class": lambda i, t: F.cross_entropy(t[:3], i),
    "class to be ignored": lambda i, t: F.nll_loss(t[:3], i, ignore_index=2),
    "bag": lambda i, t: F.embedding_bag(i[None], t),
}


def traced(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def raises(function: Callable[..., Any], *inputs: Any) -> bool:
    try:
        function(*inputs)
    except (IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_is_held_back_exactly_where_eager_raises(name: str) -> None:
    function, good = KNOWN[name], torch.tensor([1, 2, 1])
    found = graph_indices(traced(function, good, TABLE))
    assert found.unknown == ()
    assert found.outside((good, TABLE)) is None
    outcomes = set()
    for value in PROBES:
        given = torch.tensor([1, value, 1])
        outcomes.add(raises(function, given, TABLE))
        # An index between bounds may be masked away: then it may be held back needlessly.
        if name != "masked" or raises(function, given, TABLE):
            assert (found.outside((given, TABLE)) is not None) == raises(function, given, TABLE), value
    assert outcomes == {True, False}, "the probes tell nothing"


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.uint8, 200), (torch.int8, -1), (torch.int16, 300), (torch.int32, 7)]
)
def test_narrow_integers_are_looked_at_too(dtype: torch.dtype, value: int) -> None:
    found = graph_indices(traced(lambda i, t: F.embedding(i.long(), t), torch.zeros(3, dtype=dtype), TABLE))
    assert found.outside((torch.tensor([0, 6, 0], dtype=dtype), TABLE)) is None
    assert found.outside((torch.tensor([0, value, 0], dtype=dtype), TABLE)) is not None


ALWAYS_GOOD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a range": lambda s: TABLE[torch.arange(1, 7)],
    "constants": lambda s: TABLE[torch.tensor([0, 6])],
    "nothing": lambda s: TABLE[torch.zeros(0, dtype=torch.int64)],
    "the largest": lambda s: TABLE[s.argmax(1)],
    "the best": lambda s: s.gather(1, s.topk(2, 1).indices),
    "a mask": lambda s: F.embedding((s > 0).long(), TABLE),
    "between bounds": lambda s: TABLE[s.long().clamp(0, 6)],
    "rows and columns": lambda s: TABLE.take(torch.arange(7)[:, None] * 4 + torch.arange(4)),
    "a remainder": lambda s: TABLE[s.long() % 7],
    "computed from no input": lambda s: TABLE[(torch.arange(1, 7).float().log() * 3).long()],
    "masked, computed from no input": lambda s: TABLE[torch.where(torch.arange(9) < 7, torch.arange(9), 3)],
    "mask tokens counted": lambda s: TABLE[(s > 0).int().cumsum(1) * (s > 0).int() + 1],
    "what another table holds": lambda s: TABLE[torch.tensor([3, 6, 1])[s.argmax(1) % 3]],
}


@pytest.mark.parametrize("name", ALWAYS_GOOD)
def test_an_index_that_cannot_be_out_of_range_asks_for_nothing(name: str) -> None:
    assert graph_indices(traced(ALWAYS_GOOD[name], SCORES)) == GraphIndices()


MAPPING, OFFSETS = torch.tensor([0, 3, 6, 1]), torch.tensor([0, 2, 4])

COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "doubled": lambda i, o: TABLE[i * 2],
    "offset by a buffer": lambda i, o: F.embedding(i + o, TABLE),
    "offset by columns": lambda i, o: F.embedding_bag(i[None] + o, TABLE),
    "masks counted": lambda i, o: F.embedding((i.cumsum(0) * i - 1).long() + 2, TABLE),
    "times a mask": lambda i, o: TABLE[(i > 1).int().long() * i],
    "a sum": lambda i, o: TABLE[i + i],
    "negated": lambda i, o: TABLE[-i],
    "only where a mask says so": lambda i, o: TABLE[torch.ones_like(i).repeat(3).cumsum(0) * (i[0] > 9).long()],
    "constants out of range": lambda i, o: TABLE[torch.arange(8) * i.sum().clamp(0, 1)],
    "by an index that is computed": lambda i, o: TABLE[MAPPING[i * 2] * i],
    "pieces": lambda i, o: TABLE[(i * o).split(1)[1]],
    "two from one": lambda i, o: TABLE[i * 2] + SCORES[(i * 2)[:1] - 1].sum(),
    "class to be ignored": lambda i, o: F.nll_loss(SCORES, torch.where(i > 100, 2, i * o), ignore_index=2),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_an_index_that_is_computed_from_integers_is_computed_before_a_call(name: str) -> None:
    function = COMPUTED[name]
    found = graph_indices(traced(function, torch.tensor([1, 1, 1]), OFFSETS))
    assert found.unknown == ()
    assert found.part is not None
    outcomes = set()
    for value in (*PROBES, 2, -2, -3):
        for given in (torch.tensor([value, 1, 0]), torch.tensor([1, value, 1]), torch.full((3,), value)):
            outcomes.add(raises(function, given, OFFSETS))
            problem = found.outside((given, OFFSETS))
            assert (problem is not None) == raises(function, given, OFFSETS), (given, problem)
    assert outcomes == {True, False}, "the probes tell nothing"


def test_what_indices_share_is_computed_once_and_what_they_do_not_need_is_not() -> None:
    def function(floats: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        doubled = i * 2
        return TABLE[doubled] * floats[:, None] + TABLE[doubled - 1]

    floats, good = torch.randn(24), torch.tensor([1, 2, 1] * 8)  # of fewer, Python finds the ends
    found = graph_indices(traced(function, floats, good))
    assert found.part is not None
    assert found.part.inputs == (1,)
    with profile() as seen:
        assert found.outside((floats, good)) is None
    called = [event.name for event in seen.events()]
    assert (called.count("aten::mul"), called.count("aten::aminmax")) == (1, 2)
    problem = found.outside((floats, torch.tensor([3, 4, 3] * 8)))
    assert problem == "computed index 0 holds 6 to 8, and must be in [-7, 7)"


UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "from floats": lambda i: F.embedding((i / 2).long(), TABLE),
    "from floats, and computed": lambda i: F.embedding((i / 2).long() * i, TABLE),
    "drawn": lambda i: TABLE[torch.randint(0, 4, (3,))],
    "computed from no input, out of range": lambda i: TABLE[(torch.arange(9).float() * 1.5).long()[:8]] * i[0],
    "cut to fewer bits": lambda i: TABLE[i.to(torch.int8).long()],
    "a sum of few bits": lambda i: TABLE[(i.to(torch.int8) + 1).long()],
    "a product of fewer bits": lambda i: TABLE[i.int() * 2],
    "of sizes that depend on data": lambda i: TABLE[i.nonzero()[:, 0] * i[:1]],
    "too large to compute twice": lambda i: TABLE[(i[0] * 2).expand(1 << 21)][0],
    "memory beside it": lambda i: TABLE[i[1:].as_strided((1,), (1,), 0)],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_index_that_is_computed_otherwise_is_said_to_be_unknown(name: str) -> None:
    found = graph_indices(traced(UNKNOWN[name], torch.tensor([1, 2, 1])))
    assert found.unknown in (("index",), ("embedding",))
    with pytest.raises(CandidateError, match="computes an index"):
        found.needed_by(registry.get("openvino"))
    assert found.needed_by(registry.get("torchscript")) == GraphIndices(), "it raises as eager does"


def test_values_that_are_ignored_may_be_anything() -> None:
    found = graph_indices(traced(lambda i, t: F.cross_entropy(t[:3], i), torch.tensor([1, 2, 1]), TABLE))
    for given, good in (([-100, 2, -100], True), ([-100] * 3, True), ([-100, 4, 0], False), ([-100, -1, 0], False)):
        assert (found.outside((torch.tensor(given), TABLE)) is None) == good
    assert found.outside((torch.zeros(0, dtype=torch.int64), TABLE)) is None


DYNAMIC: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, int, int, bool], ...]]] = {
    "given": (
        lambda rows, ids, places: rows[ids] + places[torch.arange(ids.shape[0])],
        ((5, 4, 4, True), (9, 4, 8, True), (9, 4, 9, False), (9, 2, 1, False)),
    ),
    "computed": (
        lambda rows, ids, places: rows[ids * 2] + places[torch.arange(ids.shape[0]) + ids[1] * ids.shape[0] // 3],
        ((5, 4, 2, True), (9, 4, 4, True), (9, 4, 5, False), (9, 3, 4, False), (6, 5, 3, False)),
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_of_a_dynamic_graph_are_taken_from_its_inputs(name: str) -> None:
    function, cases = DYNAMIC[name]
    problems: list[str | None] = []

    def looking(module: GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found = graph_indices(module)
            assert found.unknown == ()
            assert (found.part is not None) == (name == "computed")
            problems.append(found.outside(inputs))
            return module.forward(*inputs)

        return run

    picked = torch.compile(function, backend=aot_autograd(fw_compiler=looking), dynamic=True)
    for count, places, index, good in cases:
        ids = torch.tensor([0, 1, index])
        if good:
            picked(torch.randn(count, 2), ids, torch.randn(places, 2))
        else:
            with pytest.raises(IndexError):
                picked(torch.randn(count, 2), ids, torch.randn(places, 2))
        assert (problems.pop() is None) == good
        assert problems == []
