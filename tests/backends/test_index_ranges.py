"""Which inputs of a segment are indices, and what they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coexec.backends.fed import NotLowerableError
from coexec.backends.index_ranges import IndexRange, computed_index, index_ranges
from coexec.backends.inductor import compile_segment
from coexec.backends.spec import TensorInput
from tests.backends.recording import record

INTEGERS = torch.tensor([0, 2, 1])
SCORES = torch.randn(3, 5)
TABLE = torch.randn(7, 4)


def added_in_a_list(index: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([index], 1)
    return index


def added_to_the_rest(index: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([index[1:]], 1)
    return index


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[tuple[int, bool, int | None]]]] = {
    "embedding": (lambda i: F.embedding(i, TABLE), [(7, False, None)]),
    "through views and copies": (
        lambda i: F.embedding(i[None, :2].expand(2, 2).contiguous(), TABLE),
        [(7, False, None)],
    ),
    "parts of it joined": (lambda i: F.embedding(torch.cat([i[:1], i[1:]]), TABLE), [(7, False, None)]),
    "position": (lambda i: TABLE[i], [(7, True, None)]),
    "second position": (lambda i: TABLE[:, i], [(4, True, None)]),
    "both positions": (lambda i: TABLE[i, i], [(7, True, None), (4, True, None)]),
    "behind a mask": (lambda i: torch.zeros(3, 7)[SCORES[:, 0] > -9, i], [(7, True, None)]),
    "written by position": (lambda i: TABLE.clone().index_put_((i,), torch.zeros(3, 4)), [(7, True, None)]),
    "gather": (lambda i: SCORES.gather(1, i[:, None]), [(5, False, None)]),
    "gather, from the end": (lambda i: SCORES.gather(-1, i[:, None]), [(5, False, None)]),
    "scatter": (lambda i: torch.zeros(4).scatter_add(0, i, torch.ones(3)), [(4, False, None)]),
    "index_select": (lambda i: TABLE.index_select(1, i), [(4, False, None)]),
    "take": (lambda i: TABLE.take(i), [(28, True, None)]),
    "bag": (lambda i: F.embedding_bag(i[None], TABLE), [(7, False, None)]),
    "index_reduce": (lambda i: torch.zeros(4).index_reduce(0, i, torch.ones(3), "amax"), [(4, False, None)]),
    "class": (lambda i: F.cross_entropy(SCORES, i), [(5, False, -100)]),
    "class to be ignored": (lambda i: F.nll_loss(SCORES, i, ignore_index=2), [(5, False, 2)]),
    "pixels": (lambda i: F.cross_entropy(SCORES[None, :, :, None].transpose(1, 2), i[None, :, None] * 1), []),
    "copied into other memory": (
        lambda i: F.embedding(torch.zeros(3, dtype=torch.long).copy_(i), TABLE),
        [(7, False, None)],
    ),
    "cast": (lambda i: F.embedding(i.int(), TABLE), [(7, False, None)]),
    "cast to what may wrap around": (lambda i: F.embedding(i.to(torch.uint8).long(), TABLE), []),
    "overwritten by a copy of what is computed": (lambda i: F.embedding(i.clone().copy_(i + 1), TABLE), []),
    "computed": (lambda i: F.embedding(i + 1, TABLE), []),
    "overwritten": (lambda i: F.embedding(i.clone().add_(1), TABLE), []),
    "overwritten in a list": (lambda i: F.embedding(added_in_a_list(i.clone()), TABLE), []),
    "overwritten in a list through a view": (lambda i: F.embedding(added_to_the_rest(i.clone()), TABLE), []),
    "no index": (lambda i: TABLE[:3] * i[:, None], []),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # it is said to be in beta
@pytest.mark.parametrize("name", CASES)
def test_ranges_of_an_input(name: str) -> None:
    step, expected = CASES[name]
    spec = record(lambda recorder: [step(INTEGERS)]).spec
    found = index_ranges(spec)
    assert [(r.size, r.from_end, r.ignored) for r in found] == expected
    for r in found:
        entry = spec.inputs[r.input]
        assert isinstance(entry, TensorInput)
        assert (entry.value.dtype, entry.value.sizes) == ("int64", (3,))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float32, torch.float64])
def test_indices_that_come_in_another_dtype(dtype: torch.dtype) -> None:
    given = INTEGERS.to(dtype)
    spec = record(lambda recorder: [F.cross_entropy(SCORES, given.long())]).spec
    assert [(r.size, r.from_end, r.ignored) for r in index_ranges(spec)] == [(5, False, -100)]


def test_backward_of_an_embedding_and_a_loss() -> None:
    table = TABLE.clone().requires_grad_()

    def step(recorder: object) -> list[torch.Tensor]:
        loss = F.cross_entropy(F.embedding(INTEGERS, table), INTEGERS)
        return list(torch.autograd.grad(loss, [table]))

    found = index_ranges(record(step).spec)
    assert [r for r in found if r.input == found[0].input] == found
    assert set(found) == {IndexRange(found[0].input, 7), IndexRange(found[0].input, 4, ignored=-100)}


FOUND_ONLY_IN_THE_RUN = {
    "pixels", "cast to what may wrap around", "overwritten by a copy of what is computed", "computed", "overwritten",
    "overwritten in a list", "overwritten in a list through a view",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_computed_index_is_named(name: str) -> None:
    op = computed_index(record(lambda recorder: [CASES[name][0](INTEGERS)]).spec)
    assert (op is not None) == (name in FOUND_ONLY_IN_THE_RUN)


def test_an_index_made_of_constants_is_known_unless_they_are_sizes() -> None:
    spec = record(lambda recorder: [F.embedding(torch.arange(3) + 1, TABLE)]).spec
    assert computed_index(spec) is None
    op = computed_index(spec, any_size=True)
    assert op is not None
    assert op.op == "aten::embedding"
    spec = record(lambda recorder: [F.embedding(torch.arange(3).add_(INTEGERS), TABLE)]).spec
    assert computed_index(spec) is not None


def test_a_constant_that_an_op_without_results_changes_is_none() -> None:
    def step(recorder: object) -> list[torch.Tensor]:
        index = torch.arange(3)
        torch._foreach_add_([index], [INTEGERS])
        return [F.embedding(index, TABLE)]

    assert computed_index(record(step).spec) is not None


def test_what_writes_in_place_is_not_compiled_with_a_computed_index(tmp_path: Path) -> None:
    spec = record(lambda recorder: [F.embedding(INTEGERS + 1, TABLE)]).spec
    with pytest.raises(
        NotLowerableError, match="aten::embedding cannot be compiled: its index is computed in a segment"
    ):
        compile_segment(replace(spec, mode="commit"), tmp_path)
