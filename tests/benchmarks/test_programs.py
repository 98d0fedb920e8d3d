"""The fifteen programs: what they are known for is in them, and co-executed they do exactly what they do eagerly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import coexec
from benchmarks.programs import catalog, dropblock, faster_rcnn_boxes
from benchmarks.programs.program import Program
from tests.coexec.harness import Program as Case
from tests.coexec.harness import check
from tests.coexec.snapshot import snapshot

STEPS = 12
UNSETTLED = {"faster_rcnn", "sdpoint", "lstm_speech"}
"""So few steps of these meet nothing but new paths: what is compared is tracing, and falling back."""


@pytest.fixture(autouse=True)
def small_and_ready(native_core: None, one_thread: None) -> Iterator[None]:
    """Steps co-execute from the first call on, and forget each other."""
    yield
    coexec.reset()


def tiny(name: str, seed: int = 0) -> Program:
    if problem := catalog.missing(name):
        pytest.skip(problem)
    return catalog.make(name, seed, tiny=True)


def as_case(name: str) -> Case:
    program = tiny(name)
    return Case(program.step, lambda i: (next(program.batches),), program.state)


def trained(name: str, steps: int, seed: int = 0) -> Program:
    program = tiny(name, seed)
    for _ in range(steps):
        program.step(next(program.batches))
    return program


@pytest.mark.parametrize("name", catalog.PROGRAMS)
def test_program_co_executed_is_bit_identical_to_eager(name: str) -> None:
    if name in UNSETTLED:
        check(lambda: as_case(name), STEPS, phase=None, max_fallbacks=STEPS, min_co_executed=0)
    else:
        check(lambda: as_case(name), STEPS, max_fallbacks=6, min_co_executed=3)


@pytest.mark.parametrize("name", catalog.PROGRAMS)
def test_same_seed_same_training_and_every_parameter_is_trained(name: str) -> None:
    first, second = tiny(name), tiny(name)
    assert snapshot(first.state()) == snapshot(second.state())
    before = {f"{key}.{n}": p.detach().clone() for key, m in first.models.items() for n, p in m.named_parameters()}
    first = trained(name, 6)
    assert snapshot(first.state()) == snapshot(trained(name, 6).state())
    assert snapshot(first.state()) != snapshot(trained(name, 6, seed=1).state())
    for key, model in first.models.items():
        for n, parameter in model.named_parameters():
            assert parameter.isfinite().all(), n
            moved = not torch.equal(parameter, before[f"{key}.{n}"])
            assert moved == parameter.requires_grad, f"{n} moved: {moved}"


def test_the_catalog_has_the_ten_of_the_paper_and_five_more() -> None:
    assert len(catalog.PAPER) == 10
    assert len(set(catalog.PROGRAMS)) == 15
    with pytest.raises(KeyError, match="there are resnet50"):
        catalog.make("resnet")


def test_dropblock_rewrites_keep_prob_and_gamma_between_steps() -> None:
    program = trained("dropblock", 3)
    assert len(set(program.extras["history"])) == 3
    layer = next(module for module in program.models["model"].modules() if isinstance(module, dropblock.DropBlock))
    layer.set_keep_prob(0.5, extent=8)
    x = torch.ones(64, 4, 8, 8)
    y = layer(x)
    assert float((y == 0).float().mean()) == pytest.approx(0.5, abs=0.08)
    assert float(y.mean()) == pytest.approx(1.0, abs=1e-5)


def test_sdpoint_has_33_paths_of_different_sizes() -> None:
    program: Any = tiny("sdpoint")
    random.seed(0)
    model = program.models["model"]
    assert len(model.blocks) == 16
    drawn = set()
    for _ in range(500):
        model.draw_point()
        drawn.add((model.point, model.ratio))
    assert len(drawn) == 33


def test_music_transformer_writes_attributes_while_it_runs() -> None:
    program: Any = trained("music_transformer", 1)
    attention = program.models["model"].layers[0].attention
    assert (attention.len_q, attention.len_k) == (12, 12)
    assert attention.weights is program.extras["maps"]["layer 0, 12 x 12"]


@pytest.mark.parametrize("name", ["gpt2", "faster_rcnn", "lstm_speech", "gnn"])
def test_sizes_change_from_batch_to_batch(name: str) -> None:
    batches = tiny(name).batches
    sizes = {tuple(tuple(t.shape) for t in tensors_of(next(batches))) for _ in range(8)}
    assert len(sizes) > 3


def tensors_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, tuple | list):
        return [tensor for part in batch for tensor in tensors_of(part)]
    if hasattr(batch, "__dataclass_fields__"):
        return tensors_of([getattr(batch, name) for name in batch.__dataclass_fields__])
    return []


def test_boxes_of_faster_rcnn() -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0], [20.0, 20.0, 30.0, 40.0]])
    assert faster_rcnn_boxes.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist() == [1, 2]
    anchors = torch.tensor([[2.0, 2.0, 9.0, 8.0]]).expand(3, 4)
    torch.testing.assert_close(faster_rcnn_boxes.decode(anchors, faster_rcnn_boxes.encode(anchors, boxes)), boxes)
    assert float(faster_rcnn_boxes.iou(boxes[:1], boxes[1:2])) == pytest.approx(0.81)


def test_roi_align_of_a_slope_gives_the_middle_of_each_cell() -> None:
    slope = torch.arange(16.0).expand(2, 16, 16)  # the value of a place is its column
    pooled = faster_rcnn_boxes.roi_align(slope, torch.tensor([[8.0, 16.0, 72.0, 80.0]]), 1 / 8, pooled=4)
    torch.testing.assert_close(pooled[0, 0], torch.tensor([1.5, 3.5, 5.5, 7.5]).expand(4, 4))
