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


UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "computed": lambda i: TABLE[i * 2],
    "from floats": lambda i: F.embedding((i / 2).long(), TABLE),
    "a sum": lambda i: TABLE[i + i],
    "negated": lambda i: TABLE[-i],
    "counted up": lambda i: TABLE[i.cumsum(0)],
    "counted up too far": lambda i: TABLE[torch.ones_like(i).repeat(3).cumsum(0) * (i[0] > 9).long()],
    "drawn": lambda i: TABLE[torch.randint(0, 4, (3,))],
    "computed from no input, out of range": lambda i: TABLE[(torch.arange(9).float() * 1.5).long()[:8]] * i[0],
    "cut to fewer bits": lambda i: TABLE[i.to(torch.int8).long()],
    "a sum of few bits": lambda i: TABLE[(i.to(torch.int8) + 1).long()],
    "constants out of range": lambda i: TABLE[torch.arange(8) * i.sum().clamp(0, 1)],
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


def test_sizes_of_a_dynamic_graph_are_taken_from_its_inputs() -> None:
    problems: list[str | None] = []

    def looking(module: GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found = graph_indices(module)
            assert found.unknown == ()
            problems.append(found.outside(inputs))
            return module.forward(*inputs)

        return run

    @torch.compile(backend=aot_autograd(fw_compiler=looking), dynamic=True)
    def picked(rows: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return rows[ids] + places[torch.arange(ids.shape[0])]

    for count, places, index, good in ((5, 4, 4, True), (9, 4, 8, True), (9, 4, 9, False), (9, 2, 1, False)):
        ids = torch.tensor([0, 1, index])
        if good:
            picked(torch.randn(count, 2), ids, torch.randn(places, 2))
        else:
            with pytest.raises(IndexError):
                picked(torch.randn(count, 2), ids, torch.randn(places, 2))
        assert (problems.pop() is None) == good
        assert problems == []
