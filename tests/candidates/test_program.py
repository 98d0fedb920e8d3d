"""Programs: stored as text, checked, with inputs described and made again; tensors in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coexec.backends.candidates import program_json
from coexec.backends.candidates.core import split
from coexec.backends.candidates.inputs import describe_inputs, make_inputs
from coexec.backends.candidates.program import ProgramError
from coexec.backends.candidates.tensor_file import read_tensors, write_tensors
from tests.candidates.samples import Anchors, handmade, inference, kinds, program, training


@pytest.mark.parametrize("kind", [*kinds(), "everything"])
def test_a_program_read_back_computes_the_same_bits_and_is_written_the_same(kind: str) -> None:
    original = program(kind)
    text = program_json.dumps(original)
    again = program_json.loads(text, original.inputs)
    assert program_json.dumps(again) == text
    assert again.static_inputs == original.static_inputs
    for a, b in zip(original.run_eagerly(*original.inputs), again.run_eagerly(*original.inputs), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_symbols_survive_and_one_text_serves_several_sizes() -> None:
    dynamic = inference(torch.nn.Linear(4, 3), (torch.randn(5, 4),), dynamic=True)
    again = program_json.loads(program_json.dumps(dynamic), dynamic.inputs)
    sizes = [v.shape[0] for v in (n.meta["val"] for n in again.placeholders()) if isinstance(v, torch.Tensor)]
    assert any(isinstance(size, torch.SymInt) for size in sizes)
    assert program_json.dumps(again) == program_json.dumps(program_json.loads(program_json.dumps(again), again.inputs))


def test_constants_of_the_graph_travel_and_awkward_numbers_too() -> None:
    table = torch.tensor([1.5, float("inf"), -0.0])
    graph = handmade(lambda x: (torch.clamp(x, max=float("inf")) * table + 1e-45, x > float("-inf")), (torch.ones(3),))
    again = program_json.loads(program_json.dumps(graph), graph.inputs)
    for a, b in zip(graph.run_eagerly(*graph.inputs), again.run_eagerly(*graph.inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda t: t.replace('"aten::', '"nosuch::'), "unknown in this process"),
        (lambda t: t.replace('"aten::addmm"', '"operator.attrgetter"'), "no function that a stored program may call"),
        (lambda t: t.replace('"format":1', '"format":9'), "collect it again"),
        (lambda t: t[:-5], "no JSON"),
        (lambda t: t.replace('"outputs"', '"results"'), "lacks"),
    ],
)
def test_a_damaged_text_says_what_is_wrong(damage, match: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProgramError, match=match):
        program_json.loads(damage(program_json.dumps(program("mlp"))))


def test_made_inputs_keep_shape_range_and_layout() -> None:
    live = (
        torch.rand(6, 4).t() + 3,
        torch.randint(2, 9, (50,)),
        torch.randn(4, 1).expand(4, 3),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        7,
    )
    for sampled in (0, 1000):
        made = make_inputs(describe_inputs(live, sample_bytes=sampled), seed=1)
        for a, b in zip(live, made, strict=True):
            if isinstance(a, torch.Tensor):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                assert a.min() <= b.min()
                assert b.max() <= a.max()
            else:
                assert a == b
        assert torch.equal(made[1], live[1]) == bool(sampled)


def test_tensors_of_all_kinds_come_back_from_a_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).t(),
        "b": torch.arange(5),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.empty(0, 3),
        "e": torch.randn(4, 1).expand(4, 3),
        "f": torch.tensor([True, False]),
        "g": torch.randn(3, dtype=torch.complex64),
    }
    write_tensors(tmp_path / "t", tensors)
    for name, tensor in read_tensors(tmp_path / "t").items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.stride() == tensors[name].stride()
    (tmp_path / "bad").write_bytes(b"\xff" * 100)
    with pytest.raises(ProgramError, match="no tensor file"):
        read_tensors(tmp_path / "bad")


def test_the_frame_keeps_what_is_no_work_out_of_the_core() -> None:
    graph = handmade(lambda x, y: (torch.sin(x).t(), y, x.t()[1:], None, 3), (torch.randn(3, 4), torch.randn(2, 2)))
    core = split(graph, row_major=True)
    assert core.sources == (0,)
    assert len(core.outputs) == 1
    assert core.outputs[0].strides == (4, 1), "transposed outside, without a copy"
    with pytest.raises(ProgramError, match="nothing is computed"):
        split(handmade(lambda x: (x.t(), x), (torch.randn(3, 4),)))


def test_an_output_that_is_the_same_in_each_call_is_left_to_the_frame() -> None:
    model = Anchors().eval().requires_grad_(False)
    core = split(inference(model, (torch.randn(3, 4),)))
    assert [layout.sizes for layout in core.outputs] == [(3, 4)]
    drawn = handmade(lambda x: (torch.sin(x), torch.rand(3)), (torch.randn(2),))
    assert len(split(drawn).outputs) == 2, "draws keep their order"


def test_training_graphs_are_programs() -> None:
    forward, backward = training(torch.nn.Linear(6, 2), (torch.randn(3, 6),))
    for part in (forward, backward):
        assert part.training
        assert program_json.loads(program_json.dumps(part), part.inputs).training
