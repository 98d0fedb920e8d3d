"""TorchScript, optimize_for_inference and the Static Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError, captures_constants
from tests.candidates.checks import assert_same_as_eager, built
from tests.candidates.samples import Anchors, inference, kinds, program

NAMES = ("torchscript", "optimize-for-inference", "static-runtime")


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("name", NAMES)
def test_results_are_eagers(name: str, kind: str, tmp_path: Path) -> None:
    assert_same_as_eager(built(registry.get(name), program(kind), tmp_path), program(kind))


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_file_holds_no_weights_and_serves_other_weights(name: str, tmp_path: Path) -> None:
    first = program("conv")
    candidate = registry.get(name)
    metadata = candidate.build(first, tmp_path, threads=1, budget_s=1)
    weights = sum(t.nbytes for t in (first.inputs[i] for i in first.static_inputs) if isinstance(t, torch.Tensor))
    big = inference(torch.nn.Linear(512, 512), (torch.randn(2, 512),))
    folder = tmp_path / "big"
    folder.mkdir()
    candidate.build(big, folder, threads=1, budget_s=1)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 512 * 512 * 4 / 20, weights
    other = first.with_inputs([t * 0.5 if i in first.static_inputs else t for i, t in enumerate(first.inputs)])
    assert not candidate.bakes_constants
    assert_same_as_eager(candidate.load(tmp_path, metadata, other, threads=1), other)


def test_a_frozen_graph_says_that_it_captures_weights_and_a_plain_one_sees_them_change(tmp_path: Path) -> None:
    assert captures_constants(registry.get("optimize-for-inference"))
    assert captures_constants(registry.get("static-runtime"))
    plain = registry.get("torchscript")
    assert not captures_constants(plain)
    changing = inference(torch.nn.Linear(4, 3), (torch.randn(2, 4),))
    run = built(plain, changing, tmp_path)
    with torch.no_grad():
        for position in changing.static_inputs:
            changing.inputs[position].add_(1)
    assert_same_as_eager(run, changing)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_callers_to_write_into(name: str, tmp_path: Path) -> None:
    """A frozen graph folds what depends on weights alone; the Static Runtime's results are inference tensors."""
    anchors = inference(Anchors().eval().requires_grad_(False), (torch.randn(3, 4),))
    run = built(registry.get(name), anchors, tmp_path)
    for _ in range(2):
        with torch.no_grad():
            results = run(*anchors.inputs)
        for result, expected in zip(results, anchors.run_eagerly(*anchors.inputs), strict=True):
            torch.testing.assert_close(result, expected)
            assert not result.is_inference()
            result.add_(100)
    with torch.inference_mode():
        assert all(result.is_inference() for result in run(*anchors.inputs))


def test_fusion_by_onednn_graph_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    """The switch is global, makes the passes of optimize_for_inference fail, and slows small nets down."""
    torch.jit.enable_onednn_fusion(True)
    try:
        with pytest.raises(CandidateError, match="enable_onednn_fusion"):
            built(registry.get("optimize-for-inference"), program("mlp"), tmp_path)
        assert torch.jit.onednn_fusion_enabled()
    finally:
        torch.jit.enable_onednn_fusion(False)


def test_what_holds_the_gil_says_so() -> None:
    """The Static Runtime's binding keeps it for the whole call; nothing in Python can let it go."""
    held = [name for name, candidate in registry.candidates().items() if getattr(candidate, "holds_gil", False)]
    assert held == ["static-runtime"]


def test_no_switch_of_the_process_is_changed(tmp_path: Path) -> None:
    built(registry.get("optimize-for-inference"), program("mlp"), tmp_path)
    assert not torch.jit.onednn_fusion_enabled()


def test_a_dynamic_graph_is_refused(tmp_path: Path) -> None:
    dynamic = inference(torch.nn.Linear(4, 3), (torch.randn(5, 4),), dynamic=True)
    with pytest.raises(CandidateError, match="dynamic"):
        built(registry.get("torchscript"), dynamic, tmp_path)
