"""One segment for many sizes: what its integers follow, what is refused, and an artifact at sizes never observed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

from coexec.backends.expressions import NotExpressibleError, Token, express
from coexec.backends.guards import evaluate, holds, tokens_of
from coexec.backends.inductor import compile_segment, compile_symbolic
from coexec.backends.key import artifact_key
from coexec.backends.symbolic import SymbolSource, unify
from coexec.backends.verify import verify
from tests.backends.recording import Recorder, Recording, record


@pytest.mark.parametrize(
    ("values", "text"),
    [((16, 7), "s0"), ((160, 70), "10*s0"), ((48, 35), "s0*s1"), ((768, 560), "16*s0*s1"), ((17, 8), "s0+1"),
     ((33, 15), "2*s0+1"), ((8, 3), "(s0)//2"), ((9, 25), "s1*s1")],
)  # fmt: skip
def test_an_integer_follows_sizes_in_the_simplest_way(values: tuple[int, int], text: str) -> None:
    found = express(values, [(16, 7), (3, 5)])
    assert found is not None
    assert str(found) == text
    for at, value in zip(((16, 3), (7, 5)), values, strict=True):
        assert found.value(at) == value
        assert evaluate(found.tokens(), at) == value


def test_an_integer_that_follows_nothing() -> None:
    assert express((1000, 3, 77), [(16, 7, 9)]) is None


def test_guards_in_the_native_cores_arithmetic() -> None:
    s, t = sympy.symbols("s t", integer=True, positive=True)
    tokens = tokens_of(sympy.And(s * t + 1 < 100, sympy.Ne(s, t), s**2 >= 4, evaluate=False), {s: 0, t: 1})
    assert [evaluate(tokens, at) for at in ((2, 3), (3, 3), (1, 5), (20, 30))] == [1, 0, 0, 0]
    with pytest.raises(NotExpressibleError, match="sin"):
        tokens_of(sympy.sin(s) < t, {s: 0, t: 1})
    assert evaluate(((Token.CONSTANT, 1), (Token.SYMBOL, 0), (Token.FLOOR_DIVIDE, 0)), (0,)) is None


def step_at(rows: int) -> Recording:
    """Forward, backward and SGD of a small classifier on `rows` samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x, y = torch.randn(rows, 8), torch.randint(0, 3, (rows,))

    def step(recorder: Recorder) -> list[torch.Tensor]:
        loss = F.cross_entropy(F.dropout(model(x), 0.2), y)
        recorder.publish(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return record(step, "functional", 1, seed=7)


def test_two_processes_that_saw_other_sizes_have_one_key() -> None:
    first, second = (unify([step_at(a).spec, step_at(b).spec]) for a, b in ((16, 7), (5, 40)))
    assert first.symbols == (SymbolSource(2, 0),)
    assert artifact_key(first) == artifact_key(second)
    assert artifact_key(first) != artifact_key(first.observed[0])
    assert first.at((9,)).inputs == step_at(9).spec.inputs
    assert first.at((9,)).ops == step_at(9).spec.ops


def test_a_size_of_one_is_never_part_of_it() -> None:
    with pytest.raises(NotExpressibleError, match="below 2"):
        unify([step_at(16).spec, step_at(1).spec])


def test_what_differs_otherwise_is_refused() -> None:
    def narrow(rows: int, width: int) -> Recording:
        x = torch.randn(rows, 8)
        return record(lambda recorder: [x[:, :width] * 2], seed=1)

    with pytest.raises(NotExpressibleError, match="follows from no size"):
        unify([narrow(16, 3).spec, narrow(7, 5).spec, narrow(9, 2).spec])


@pytest.mark.compile
def test_an_artifact_is_right_at_sizes_that_nobody_saw() -> None:
    spec = unify([step_at(16).spec, step_at(7).spec])
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_symbolic(spec, Path(folder))
        guards = compiled.facts["guards"]
        for rows in (16, 7, 2, 33):
            live = step_at(rows)
            assert holds(guards, (rows,))
            report = verify(live.spec, compiled.library, live.fresh_inputs(), live.rng_before, timed=False)
            assert report.accepted, (rows, report.problems)
        assert not holds(guards, (1,))
        assert not holds(guards, (0,))


@pytest.mark.compile
@pytest.mark.parametrize("op", ["add_", "sub_"])
def test_alpha_behind_a_matrix_product_is_kept(op: str) -> None:
    """SGD's update of a weight: Inductor's addmm fusion would drop alpha."""
    weight, x, grad = torch.randn(32, 8), torch.randn(16, 8), torch.randn(16, 32)

    def step(recorder: Recorder) -> list[torch.Tensor]:
        getattr(weight, op)((grad * 2).t() @ x, alpha=-0.01)
        return []

    recording = record(step)
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_segment(recording.spec, Path(folder))
        report = verify(recording.spec, compiled.library, recording.fresh_inputs(), timed=False)
    assert report.accepted, report.problems
